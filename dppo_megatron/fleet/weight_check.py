"""Whether an engine scores the probe as the trainer does, and so serves the trainer's weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ProbeDifference:
    """Between an engine's and the trainer's log-probs of the probe's tokens, nats.

    The mean tells other weights from other rounding: in 16 bits a single token may be off by several nats, where the
    router of a mixture of experts decides otherwise; with stale experts the mean is.
    """

    mean: float  # NaN where a score is
    largest: float

    @classmethod
    def between(cls, scores: np.ndarray, expected: np.ndarray) -> ProbeDifference:
        """Both fp32 [P - 1]."""
        difference = np.abs(scores - expected)
        return cls(float(difference.mean()), float(difference.max()))

    @classmethod
    def worst(cls, differences: Collection[ProbeDifference]) -> ProbeDifference:
        return cls(max(d.mean for d in differences), max(d.largest for d in differences))

    def within(self, tolerance: float) -> bool:
        return self.mean <= tolerance  # False for NaN

    def __str__(self) -> str:
        return f"{self.mean:.3g} in the mean (at most {self.largest:.3g})"
