"""Computes means with bootstrap intervals over seeds, and differences of methods paired by seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .rows import StudyRow

RESAMPLES, LEVEL = 10_000, 0.95


class Estimate(NamedTuple):
    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean with its 95 % percentile bootstrap interval; None for fewer than three values."""
    if len(values) < 3:
        return None
    drawn = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    means = np.asarray(values, float)[drawn].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(np.mean(values)), float(low), float(high))


def finals(rows: Sequence[StudyRow], method: str, condition: str) -> dict[int, float]:
    """Return seed -> final metric, without runs that recorded none."""
    chosen = [row for row in rows if row.method == method and row.condition == condition]
    return {row.seed: row.final for row in chosen if row.final is not None}


def difference(rows: Sequence[StudyRow], method: str, reference: str, condition: str) -> Estimate | None:
    """Estimate the difference of two methods over the seeds that both have."""
    ours, theirs = finals(rows, method, condition), finals(rows, reference, condition)
    return estimate([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])
