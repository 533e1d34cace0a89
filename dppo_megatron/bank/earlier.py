"""Find a prompt's earlier samples in a bank."""

from __future__ import annotations

import logging
from threading import Lock

import numpy as np

from dppo_megatron.types import Prompt

from .errors import BankError
from .reader import BankReader
from .retention import retired_segments

log = logging.getLogger(__name__)

GROUPS = 2  # how many newest groups per prompt are read
PROMPT_TOKENS = 16  # last prompt tokens before each sample


class EarlierSamples:
    """Reads a prompt's newest samples from a bank, which need not exist yet.

    Keeps the numbers of each row's newest groups in memory. Calls may come from several threads.
    """

    def __init__(self, reader: BankReader):
        self._reader = reader
        self._num_groups = 0  # groups with known rows
        self._numbers: dict[int, list[int]] = {}  # row -> numbers of the newest groups
        self._retired: set[int] = set()  # segments
        self._lock = Lock()

    def samples(self, prompt: Prompt) -> tuple[np.ndarray, ...]:
        """Return the samples in the prompt's newest groups, each after the last prompt tokens, [.] int32.

        Deleted and unreadable groups are skipped.
        """
        with self._lock:
            try:
                self._follow()
                numbers = self._numbers.get(prompt.row, ())
                return tuple(sample for number in numbers for sample in self._read(number, prompt))
            except BankError as error:
                log.warning("no drafts from the bank: %s", error)
                return ()

    def _follow(self) -> None:
        for number in range(self._num_groups, self._reader.refresh()):
            row, self._num_groups = self._reader.row(number), number + 1
            self._numbers[row] = [*self._numbers.get(row, []), number][-GROUPS:]

    def _read(self, number: int, prompt: Prompt) -> list[np.ndarray]:
        (entry,) = self._reader.entries(number, number + 1)
        if entry.segment not in self._retired:
            self._retired |= retired_segments(self._reader.directory, [entry.segment])
        if entry.segment in self._retired:
            return []
        group = self._reader.read(entry, parts=("core",))
        if not np.array_equal(group.prompt.token_ids, prompt.token_ids):  # the row of another file
            return []
        return [np.concatenate([prompt.token_ids[-PROMPT_TOKENS:], r.token_ids]) for r in group.rollouts]
