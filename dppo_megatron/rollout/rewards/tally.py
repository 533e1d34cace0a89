"""Count sample outcomes for the log and the metrics."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from dppo_megatron.types import Prompt

from .outcome import Failure, Outcome

log = logging.getLogger(__name__)

_LOGGED_PER_REASON = 5  # logged failures; later failures are logged each time their number doubles


class Tally:
    """Counts sample outcomes. `names` are the term names."""

    def __init__(self, names: Sequence[str]):
        self._names = tuple(names)
        self._scored = 0
        self._failures: Counter[str] = Counter()  # reason -> number
        self.last_failure = ""
        self._clear()

    def add(self, prompt: Prompt, parts: Mapping[int, Outcome], total: float | Failure, recorded: bool) -> None:
        """Add a sample: the outcome of each term, by term number, and the reward."""
        self._scored += 1
        if isinstance(total, Failure):
            self._fail(prompt, total)
        if not recorded:
            return
        if isinstance(total, Failure):
            self._recent[total.reason] += 1
        for term, outcome in parts.items():
            if isinstance(outcome, float):
                self._sums[term] += outcome
                self._counts[term] += 1

    def take_metrics(self) -> dict[str, float]:
        """Return `reward/TERM` (mean, for several terms) and `reward/failed_REASON` (count) since the last call."""
        metrics = {f"reward/failed_{reason}": float(count) for reason, count in self._recent.items()}
        if len(self._names) > 1:
            metrics |= {f"reward/{self._names[term]}": self._sums[term] / n for term, n in self._counts.items()}
        self._clear()
        return metrics

    def close(self) -> None:
        if self._failures:
            log.warning("rewards of %d of %d samples failed: %s", *self._totals())

    def _clear(self) -> None:
        self._recent: Counter[str] = Counter()
        self._sums: dict[int, float] = dict.fromkeys(range(len(self._names)), 0.0)
        self._counts: Counter[int] = Counter()

    def _fail(self, prompt: Prompt, failure: Failure) -> None:
        self.last_failure = f"{failure.reason}: {failure.detail}"
        self._failures[failure.reason] += 1
        count = self._failures[failure.reason]
        is_power_of_two = count.bit_count() == 1
        if count <= _LOGGED_PER_REASON or is_power_of_two:
            log.warning("reward of prompt row %d failed (%s): %s", prompt.row, failure.reason, failure.detail)
        if count > _LOGGED_PER_REASON and is_power_of_two:
            log.warning("rewards of %d of %d samples failed so far: %s", *self._totals())

    def _totals(self) -> tuple[int, int, str]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._failures.most_common())
        return self._failures.total(), self._scored, reasons
