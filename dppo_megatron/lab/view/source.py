"""Reads settings, metrics and groups of a run or bank, even if damaged, and notes missing parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dppo_megatron.bank import BankEntry, BankError, BankReader
from dppo_megatron.bank.files import is_local
from dppo_megatron.config import Config, ConfigError, read_config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.report.history import History, ReportError, load_history, read_settings
from dppo_megatron.run_dir import RunDir

MAX_ROLLOUTS = 100_000  # if the bank has more, the page shows evenly spaced steps


class ViewError(ExpectedError, ValueError):
    """Raised for a directory that is neither a run nor a bank."""


@dataclass
class Source:
    """Represents a run, or only a bank, in directory `root`."""

    root: Path
    is_run: bool
    history: History
    bank: Path
    notes: list[str] = field(default_factory=list)  # missing or unreadable parts, for the page
    lost: list[str] = field(default_factory=list)  # error of each unreadable group
    missing: dict[int, str] = field(default_factory=dict)  # group number -> why the page lacks the group's tokens

    @classmethod
    def open(cls, root: Path) -> Source:
        """Open a directory. Raises `ViewError` if it is neither a run nor a bank."""
        run = RunDir(root)
        if any(root.glob("segment-*.jsonl")):
            return cls(root, False, History(root.name, {}, {}, ()), root)
        if not (run.logs.is_dir() or run.metrics.exists() or run.bank.is_dir()):
            neither = "neither a run (logs, metrics.jsonl) nor a bank (segment-000000.jsonl)"
            raise ViewError(f"{root}: {neither}; name the run.dir of a run that was started")
        notes = []
        try:
            history = load_history(root, root.resolve().name)
        except ReportError:
            history = History(root.resolve().name, read_settings(root), {}, ())
            notes.append("No metrics: the run has not ended its first step.")
        bank = Path(history.setting("rollout.bank", str) or run.bank)
        return cls(root, True, history, bank, notes)

    def config(self) -> Config | None:
        """Return the run's config, or None if it is absent or invalid in this package version."""
        if not self.is_run:
            return None
        try:
            return read_config(RunDir(self.root).config)
        except ConfigError as error:
            self.notes.append(f"Settings are not known, advantages are the reward minus the group's mean: {error}")
            return None

    def groups_of_steps(self) -> Iterator[tuple[int, list[BankEntry]]]:
        """Yield (step from 1, groups in training order) for each shown step. Reads only the bank index.

        A run's step trains on `rollout.prompts_per_step` groups. A bank without a run has a segment for each step.
        """
        reader = self.reader = BankReader(self.bank)
        try:
            reader.refresh()
        except BankError as error:
            self.notes.append(f"The bank cannot be read to its end: {error}")
        if self.bank.is_dir() and not is_local(self.bank):
            self.notes.append("The bank is on a network file system: groups of the last minute may be missing.")
        size = self.history.setting("rollout.prompts_per_step", int) or 0
        if size > 0:
            total = reader.num_groups
            pieces = [(begin, min(begin + size, total)) for begin in range(0, total, size)]
        else:
            pieces = reader.segments()
        shown = self._select(pieces)
        for number in shown:
            try:
                yield number + 1, reader.entries(*pieces[number])
            except BankError as error:
                self.lost += [str(error)] * (pieces[number][1] - pieces[number][0])

    def _select(self, pieces: list[tuple[int, int]]) -> list[int]:
        """Return the indices of steps to show."""
        if not pieces:
            return []
        try:
            samples = self.reader.entries(*pieces[0])
        except BankError:
            samples = []
        samples_per_step = sum(entry.num_samples for entry in samples) or 1
        max_steps = max(1, MAX_ROLLOUTS // samples_per_step)
        if len(pieces) <= max_steps:
            return list(range(len(pieces)))
        numbers = np.unique(np.linspace(0, len(pieces) - 1, max_steps).round().astype(int)).tolist()
        self.notes.append(
            f"{len(numbers):,} of {len(pieces):,} steps are in the table, evenly spaced, so that it has about "
            f"{MAX_ROLLOUTS:,} rollouts."
        )
        return numbers

    def all_notes(self) -> list[str]:
        return self.notes + [f"{len(self.lost):,} groups cannot be read, the first: {e}" for e in self.lost[:1]]
