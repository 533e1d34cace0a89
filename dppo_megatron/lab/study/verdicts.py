"""Computes means with intervals over seeds, method differences paired by seed, and p-values for several claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from .rows import StudyRow

LEVEL = 0.95


class Estimate(NamedTuple):
    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean with the 95 % interval of Student's t, or None for fewer than three values.

    Example: [0.1, 0.2, 0.3] gives 0.2 [-0.048, 0.448].
    """
    if len(values) < 3:
        return None
    middle, degrees = float(np.mean(values)), len(values) - 1
    reach = _quantile(degrees) * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return Estimate(middle, middle - reach, middle + reach)


@cache
def _quantile(degrees: int) -> float:
    """Return the t that the absolute value exceeds with probability 1 - LEVEL. Example: 4.303 for 2 degrees."""
    from mpmath import betainc, findroot  # SymPy needs it, so it is installed wherever torch is

    x = float(
        findroot(lambda x: betainc(degrees / 2, 0.5, 0, x, regularized=True) - (1 - LEVEL), (0, 1), solver="bisect")
    )
    return (degrees * (1 - x) / x) ** 0.5


def finals(rows: Sequence[StudyRow], method: str, condition: str) -> dict[int, float]:
    """Return seed -> final metric, without runs that did not record the metric."""
    method_rows = [row for row in rows if row.method == method and row.condition == condition]
    return {row.seed: row.final for row in method_rows if row.final is not None}


def difference(rows: Sequence[StudyRow], method: str, reference: str, condition: str) -> Estimate | None:
    """Estimate the difference between two methods over the seeds that both have."""
    ours, theirs = finals(rows, method, condition), finals(rows, reference, condition)
    return estimate([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def student_p(values: Sequence[float], margin: float | None = None) -> float:
    """Return the two-sided p-value of Student's t for a mean of 0. Needs two or more values.

    With `margin`, return the p-value for equality instead (TOST): the larger p-value of the two one-sided tests that
    the mean is outside +- margin. Example: [0.1, 0.2, 0.3] has t = 3.46 with 2 degrees of freedom, p = 0.074.
    """
    from mpmath import betainc

    degrees, middle = len(values) - 1, abs(float(np.mean(values)))
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5 or 1e-100  # so small that p is 0, and t * t is finite
    t = (middle if margin is None else margin - middle) / error
    p_value = float(betainc(degrees / 2, 0.5, 0, degrees / (degrees + t * t), regularized=True))
    if margin is None:
        return p_value
    return p_value / 2 if t > 0 else 1 - p_value / 2


def holm(ps: Mapping[int, float], tests: int) -> dict[int, float]:
    """Adjust p-values for `tests` tests by Holm's method. A missing p-value counts as 1.

    Example: {0: 0.04, 1: 0.01} of 3 tests gives {0: 0.08, 1: 0.03}.
    """
    largest, adjusted = 0.0, {}
    for rank, (test, p) in enumerate(sorted(ps.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (tests - rank)))
        adjusted[test] = largest
    return adjusted
