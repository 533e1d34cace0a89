"""The claims that the needle study tests, and the verdict of its stored rows on each.

Measures of a run:

- `half`: training steps until half of the samples begin with the right word, interpolated between steps. For a run that
  does not reach half it is the number of its steps, a lower bound. Runs that reach half are its survivors.
- `tail`: share of the samples of the last 5 steps that begin with a word of the tail, at least half a sample.

A claim compares two cells (method and condition) by ln(theirs / ours) of a measure, paired by seed. Above 0, `ours` is
faster or has the smaller tail. Student's t of the eight differences gives a 95 % interval and a p-value. Holm's
procedure adjusts the p-values of all claims together; a claim with a missing run counts with p = 1.

- A claim of a difference is confirmed if the adjusted two-sided p is below 0.05 and the mean has the claimed sign. It
  is refuted if this p is below 0.05 and the mean has the other sign.
- A claim of equality has a margin of a factor 1.25; p is the larger one of two one-sided tests (TOST). It is confirmed
  if the adjusted p is below 0.05, and refuted if the whole interval is outside the margin.
- Every other outcome is not resolved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from statistics import mean
from typing import Literal, NamedTuple

from dppo_megatron.lab.study.verdicts import Estimate, estimate, holm, student_p

SEEDS = 8
MARGIN = log(1.25)
LEVEL = 0.05
SMALLEST = 0.5 / 1024  # half a sample of a step
TAIL_STEPS = 5

Cell = tuple[str, str]  # method, condition
Curves = Mapping[tuple[str, str, int], Sequence[Mapping[str, float]]]  # cell and seed -> one record for each step


@dataclass(frozen=True)
class Claim:
    text: str
    ours: Cell
    theirs: Cell
    measure: Literal["half", "tail"] = "half"
    equal: bool = False


MAIN, RARE, ONE_UPDATE, NOISE = "f-0.01", "f-0.003", "one-update", "noise"
CLAIMS = (
    Claim("binary TV is faster than clip-higher", ("dppo_binary_tv", MAIN), ("clip_higher", MAIN)),
    Claim("binary KL is faster than clip-higher", ("dppo_binary_kl", MAIN), ("clip_higher", MAIN)),
    Claim("top-K TV is faster than clip-higher", ("dppo_topk_tv", MAIN), ("clip_higher", MAIN)),
    Claim("binary TV is faster than GRPO", ("dppo_binary_tv", MAIN), ("grpo", MAIN)),
    Claim("also at f = 0.003", ("dppo_binary_tv", RARE), ("clip_higher", RARE)),
    Claim(
        "with one update a batch they are equal",
        ("dppo_binary_tv", ONE_UPDATE),
        ("clip_higher", ONE_UPDATE),
        equal=True,
    ),
    Claim(
        "clip-higher without mu < 0.1 is faster than clip-higher", ("clip_higher_exempt", MAIN), ("clip_higher", MAIN)
    ),
    Claim("and as fast as binary TV", ("clip_higher_exempt", MAIN), ("dppo_binary_tv", MAIN), equal=True),
    Claim("binary TV is faster than no region", ("dppo_binary_tv", MAIN), ("pg_is", MAIN)),
    Claim("TV without r is faster than clip-higher", ("tv_without_r", MAIN), ("clip_higher", MAIN)),
    Claim("TV without r is as fast as binary TV", ("tv_without_r", MAIN), ("dppo_binary_tv", MAIN), equal=True),
    Claim(
        "under noise, clip-higher has a smaller tail than TV", ("clip_higher", NOISE), ("dppo_binary_tv", NOISE), "tail"
    ),
    Claim(
        "under noise, TV without r has a smaller tail than TV",
        ("tv_without_r", NOISE),
        ("dppo_binary_tv", NOISE),
        "tail",
    ),
    Claim(
        "under noise, its tail equals clip-higher's",
        ("tv_without_r", NOISE),
        ("clip_higher", NOISE),
        "tail",
        equal=True,
    ),
)

# The second round, adjusted by itself. Its question came from the arm of stale rollouts, so it has seeds of its own.
STALE = "stale-8-searched"
SECOND_ROUND = (
    Claim(
        "with rollouts up to 8 steps old, binary TV is faster than clip-higher",
        ("dppo_binary_tv", STALE),
        ("clip_higher", STALE),
    ),
    Claim("and has a smaller tail", ("dppo_binary_tv", STALE), ("clip_higher", STALE), "tail"),
)

# Conditions with the rates of the search at f = 0.01 and no search of their own: they have intervals and no verdict.
ARMS = ("mismatch", "stale-8", "experts", "experts-replay")


class Verdict(NamedTuple):
    """`mean` of ln(theirs / ours) and its interval."""

    mean: float
    low: float
    high: float
    p: float
    adjusted: float
    text: str


def measured(curve: Sequence[Mapping[str, float]], measure: str) -> float:
    """Return a measure of one run from its steps, in order."""
    if measure == "tail":
        return max(SMALLEST, mean(step["tail"] for step in curve[-TAIL_STEPS:]))
    return half(curve)


def half(curve: Sequence[Mapping[str, float]]) -> float:
    """Return the training steps until `needle` is 0.5. The first record has the samples of the start policy.

    Example: needle 0.1, 0.4, 0.6 gives 1.5: one step to 0.4, and half of the way to 0.6.
    """
    for number, (before, after) in enumerate(pairwise(curve)):
        if after["needle"] >= 0.5:
            return number + (0.5 - before["needle"]) / (after["needle"] - before["needle"])
    return float(len(curve))


def verdicts(claims: Sequence[Claim], curves: Curves) -> list[Verdict | None]:
    """Return the verdict on each claim of a round; None where not all seeds have both runs."""
    found = [differences(claim, curves) for claim in claims]
    complete = [i for i, values in enumerate(found) if len(values) == SEEDS]
    ps = {i: student_p(found[i], MARGIN if claims[i].equal else None) for i in complete}
    adjusted = holm(ps, len(claims))
    out: list[Verdict | None] = [None] * len(claims)
    for i in complete:
        middle, low, high = interval(found[i])
        clear = adjusted[i] < LEVEL
        if claims[i].equal:
            confirmed, refuted = clear, low > MARGIN or high < -MARGIN
        else:
            confirmed, refuted = clear and middle > 0, clear and middle < 0
        text = "confirmed" if confirmed else "refuted" if refuted else "not resolved"
        out[i] = Verdict(middle, low, high, ps[i], adjusted[i], text)
    return out


def interval(values: Sequence[float]) -> Estimate:
    """Return the mean of at least three differences and its 95 % interval."""
    found = estimate(values)
    assert found is not None
    return found


def reaches_half(curve: Sequence[Mapping[str, float]]) -> bool:
    return half(curve) < len(curve)


def lost(curve: Sequence[Mapping[str, float]]) -> bool:
    """Return whether fewer than 1 % of the last step's samples begin with the right word."""
    return curve[-1]["needle"] < 0.01


def differences(claim: Claim, curves: Curves) -> list[float]:
    """Return ln(theirs / ours) for every seed that both cells have."""
    ours, theirs = (
        {key[2]: measured(curve, claim.measure) for key, curve in curves.items() if key[:2] == cell}
        for cell in (claim.ours, claim.theirs)
    )
    return [log(theirs[seed] / ours[seed]) for seed in sorted(ours.keys() & theirs.keys())]
