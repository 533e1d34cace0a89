"""Write the finished turns of an unfinished group to disk before any process uses them.

A journal is a pair of files like a segment of the bank, named by the prompt's position. A turn is stored as a group of
one sample. The prompt of this group is all tokens before the turn; the trajectory is the number within the unfinished
group.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from dppo_megatron.types import Prompt, Rollout, RolloutGroup

from .blob import encode_group
from .errors import not_accessible
from .files import segment_paths, split_lines
from .lines import group_line, parse_group_line
from .reader import read_samples
from .segment import Segment

log = logging.getLogger(__name__)

_NONE = np.zeros(1, np.float32)


class Journal:
    """Opens the journal of the group of the prompt at `position` for writing.

    `found`: the turns that an earlier process wrote, in order. Records are not flushed to the device: they survive the
    termination of every process, `kill -9` included, but not a crash of the machine. Truncates an incomplete last
    record; nothing has used it yet. Raises `BankError`.
    """

    def __init__(self, directory: Path, position: int):
        self._position = position
        data, index = segment_paths(directory, position)
        self.found: list[RolloutGroup] = []
        data_size = index_size = 0
        try:
            for line in split_lines(index)[0]:
                entry = parse_group_line(line, len(self.found), position, len(self.found) + 1)
                with data.open("rb", buffering=0) as file:
                    self.found.append(read_samples(file.fileno(), entry, [0]))
                data_size, index_size = entry.offset + entry.size, index_size + len(line)
        except OSError as error:
            raise not_accessible(index, error) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            log.warning(
                "%s: truncated after %d turns, because the next one is incomplete (%s)", index, len(self.found), error
            )
        self._segment = Segment(directory, position, False, data_size=data_size, index_size=index_size)

    def add(self, trajectory: int, behind: np.ndarray, sampled: Rollout, temperature: float) -> None:
        """Write a turn, and return once it is written. Raises `BankWriteError`.

        behind: [P] int32, all tokens before the turn.
        """
        prompt = Prompt(self._position, 0, behind, "", "")
        group = RolloutGroup(prompt, (replace(sampled, trajectory=trajectory),), _NONE, _NONE > 0, temperature)
        encoded = encode_group(group)
        self._segment.write(encoded.buffers, group_line(group, self._segment.data_size, encoded))

    def remove(self) -> None:
        """Delete the files once the bank has the group; a later `add` fails. Further calls have no effect."""
        self._segment.remove()
