"""Write the finished turns of unfinished groups to disk before any process uses them, so that no turn is sampled twice.

A journal is a pair of files like a bank segment, named by the prompt position. A turn is stored as a group with one
sample. The group's prompt is all tokens before the turn; the sample's trajectory is the number within the unfinished
group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import blake2b
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
    """Opens the journal for the group at prompt `position` for writing.

    `turns`: the turns that an earlier process wrote, in order. Records are not flushed to the device: they survive
    process termination, `kill -9` included, but not a machine crash. Truncates an incomplete last record; nothing has
    used it yet. Raises `BankError`.
    """

    def __init__(self, directory: Path, position: int):
        self._position = position
        data, index = segment_paths(directory, position)
        self.turns: list[RolloutGroup] = []
        data_size = index_size = 0
        try:
            for line in split_lines(index)[0]:
                entry = parse_group_line(line, len(self.turns), position, len(self.turns) + 1)
                with data.open("rb", buffering=0) as file:
                    self.turns.append(read_samples(file.fileno(), entry, [0]))
                data_size, index_size = entry.offset + entry.size, index_size + len(line)
        except OSError as error:
            raise not_accessible(index, error) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            log.warning(
                "%s: truncated after %d turns, because the next one is incomplete (%s)", index, len(self.turns), error
            )
        self._segment = Segment(directory, position, False, data_size=data_size, index_size=index_size)

    def add(self, trajectory: int, context: np.ndarray, sampled: Rollout, temperature: float) -> None:
        """Write a turn and return once it is written. Raises `BankWriteError`.

        context: [P] int32, all tokens before the turn.
        """
        prompt = Prompt(self._position, 0, context, "", "")
        group = RolloutGroup(prompt, (replace(sampled, trajectory=trajectory),), _NONE, _NONE > 0, temperature)
        encoded = encode_group(group)
        self._segment.write(encoded.buffers, group_line(group, self._segment.data_size, encoded))

    def remove(self) -> None:
        """Delete the files once the bank has the group; a later `add` fails. Further calls have no effect."""
        self._segment.remove()


Write = Callable[[np.ndarray, Rollout], Awaitable[None]]


class FinishedTurns:
    """Stores a trajectory's finished turns, by the tokens before each turn.

    When a process died and the trajectory is played again, the turns come from here instead of an engine.
    """

    def __init__(self, turns: Iterable[tuple[np.ndarray, Rollout]] = (), write: Write | None = None):
        """Store the `turns` of an earlier process. `write` must return only once a turn is on disk."""
        self._finished = [(_key(context), sampled) for context, sampled in turns]
        self._write = write
        self.rewind()

    def rewind(self) -> None:
        """Start the trajectory again: all finished turns can be taken once more."""
        self._left = list(self._finished)

    @property
    def left(self) -> int:
        """Return the number of turns that have not been taken."""
        return len(self._left)

    def take(self, context: np.ndarray) -> Rollout | None:
        """Return the first remaining turn that was sampled after the tokens `context` [P] int32, or None."""
        key = _key(context)
        for place, (other, sampled) in enumerate(self._left):
            if other == key:
                del self._left[place]
                return sampled
        return None

    async def add(self, context: np.ndarray, sampled: Rollout) -> None:
        """Write the turn and return once it is on disk. It must not be used earlier. Raises `BankWriteError`."""
        if self._write is not None:
            await self._write(context, sampled)
        self._finished.append((_key(context), sampled))


class Journals:
    """Keeps the journals of running groups in `directory`, and creates the directory.

    done: positions of prompts with a group in the bank. Journals at these positions are removed. The constructor and
    the methods raise `BankError`.
    """

    def __init__(self, directory: Path, done: Collection[int]):
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, "journal")  # the event loop must not wait for the disk
        self._open: dict[int, Journal] = {}
        for path in sorted(directory.glob("segment-*.bin")):
            position = int(path.stem.rpartition("-")[2])
            if position in done:
                for file in segment_paths(directory, position):
                    file.unlink(missing_ok=True)
            else:
                self._open[position] = Journal(directory, position)
        if turns := sum(len(journal.turns) for journal in self._open.values()):
            log.info("%d groups continue after %d turns that an earlier process finished", len(self._open), turns)

    def oldest_version(self, position: int) -> int | None:
        """Return the oldest policy version in a group's turns from an earlier process; None without such turns."""
        groups = self._open[position].turns if position in self._open else []
        return min((int(group.rollouts[0].versions.min()) for group in groups), default=None)

    async def turns(self, position: int, trajectories: int, temperature: float) -> list[FinishedTurns]:
        """Return the finished turns for each trajectory in a group. Call it once per group."""
        loop = asyncio.get_running_loop()
        journal = await loop.run_in_executor(self._thread, self._opened, position)

        async def write(number: int, context: np.ndarray, sampled: Rollout) -> None:
            await loop.run_in_executor(self._thread, journal.add, number, context, sampled, temperature)

        turn_lists: list[list[tuple[np.ndarray, Rollout]]] = [[] for _ in range(trajectories)]
        for group in journal.turns:
            (sampled,) = group.rollouts
            turn_lists[sampled.trajectory or 0].append((group.prompt.token_ids, sampled))
        journal.turns.clear()
        return [FinishedTurns(turns, partial(write, number)) for number, turns in enumerate(turn_lists)]

    def remove(self, position: int) -> None:
        """Remove a group's journal: the bank has the group, or the group starts again. May be called in any thread."""
        self._thread.submit(self._removed, position)  # runs after pending opens and writes

    def close(self) -> None:
        """Wait until all files are written or removed."""
        self._thread.shutdown()

    def _opened(self, position: int) -> Journal:
        if position not in self._open:
            self._open[position] = Journal(self._directory, position)
        return self._open[position]

    def _removed(self, position: int) -> None:
        if (journal := self._open.pop(position, None)) is not None:
            journal.remove()


def _key(context: np.ndarray) -> bytes:
    return blake2b(np.ascontiguousarray(context).data, digest_size=16).digest()
