"""Whether an engine scores the probe as the trainer does, and so serves the trainer's weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ProbeDifference:
    """Between an engine's and the trainer's log-probs of the probe's tokens, nats.

    The mean tells other weights from other rounding: of 16-bit arithmetic a single token can be off by some nats
    where the router of a mixture of experts decides otherwise, while stale experts are off by several in the mean.
    """

    mean: float  # NaN where a score is
    largest: float

    @classmethod
    def between(cls, scores: np.ndarray, expected: np.ndarray) -> ProbeDifference:
        """Both fp32 [P - 1]."""
        difference = np.abs(scores - expected)
        return cls(float(difference.mean()), float(difference.max()))

    def within(self, tolerance: float) -> bool:
        return self.mean <= tolerance  # False for NaN

    def __str__(self) -> str:
        return f"{self.mean:.3g} in the mean (at most {self.largest:.3g})"
