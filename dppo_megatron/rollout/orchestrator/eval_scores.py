"""Score the answers to a prompt set: avg@n with its standard error, pass@k, maj@n."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np


def average(right: np.ndarray) -> tuple[float, float | None]:
    """Return the share of right answers in `right` [P, n] bool, and its standard error (None for one prompt).

    Answers to the same prompt are a cluster: they are similar, and only prompts are drawn independently. For clusters
    of equal size, the clustered standard error is the standard error of the mean over P shares (Miller 2024, arXiv
    2411.00640, section 2.2). Example: right [[1, 1], [1, 0]] has shares 1 and 0.5, so average 0.75 and error 0.25.
    """
    shares = right.mean(axis=1)
    error = float(shares.std(ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else None
    return float(shares.mean()), error


def pass_at(k: int, right: np.ndarray) -> float:
    """Estimate the probability that any of k answers to a prompt is right, from n >= k in `right` [P, n] bool.

    Uses the unbiased estimator 1 - C(n - c, k) / C(n, k) for c right answers (Chen et al. 2021, arXiv 2107.03374,
    eq. 1), averaged over the prompts.
    """
    n = right.shape[1]
    counts = right.sum(axis=1).tolist()
    return float(np.mean([1.0 - math.comb(n - c, k) / math.comb(n, k) for c in counts]))


def ks(n: int) -> list[int]:
    """Return each k for which pass@k is reported: powers of two, and n ([2, 4, 6] for n = 6); pass@1 is avg@n."""
    return sorted({2**i for i in range(1, n.bit_length()) if 2**i <= n} | ({n} if n > 1 else set()))


def majority(right: np.ndarray, answers: Sequence[Sequence[str | None]]) -> float:
    """Return the share of prompts for which the most frequent answer is right; tied answers count in equal parts.

    A response without an answer (None) does not vote; a prompt without any vote counts as wrong.
    """
    return float(np.mean([_majority(row, prompt_answers) for row, prompt_answers in zip(right, answers, strict=True)]))


def _majority(right: np.ndarray, answers: Sequence[str | None]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    max_votes = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == max_votes]
    # Equal answers have equal rewards, unless the verifier failed on some.
    shares = [np.mean([r for r, answer in zip(right, answers, strict=True) if answer == winner]) for winner in winners]
    return float(np.mean(shares))
