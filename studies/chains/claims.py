"""The claims that the study tests, and the verdict of its stored rows on each. The claims were written before the runs.

Each claim compares two methods, paired by seed. It compares the last value of the metric, or its mean over all
evaluations, which reflects speed and early collapse. A claim is confirmed if the 95 % bootstrap interval of the
difference is above 0, and refuted if it is below 0. A claim of equality is confirmed if the interval is within 5 points
of 0, and refuted if it is entirely further away. Every other outcome is not resolved at this scale.

The bootstrap interval of so few seeds is too narrow: with three seeds it is their range. So the table also has
Student's interval and its p-value, adjusted for all claims by Holm's procedure; they were added after the runs. Where
this p is 0.05 or above, the verdict says that only the bootstrap supports it. A column has the difference of survivors:
the seeds of which neither run collapsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import mean
from typing import Literal

import numpy as np

from dppo_megatron.lab.study.rows import StudyRow
from dppo_megatron.lab.study.verdicts import Estimate, estimate, holm, student_p

MARGIN, LEVEL = 0.05, 0.05
UNRESOLVED = "not resolved at this scale"
RESAMPLES = 10_000


@dataclass(frozen=True)
class Claim:
    """The claim that method `ours` is better than `theirs`, or with `equal` as good."""

    text: str
    ours: str
    theirs: str
    measure: Literal["end", "mean"] = "end"
    equal: bool = False


DPPO, DRPO, BEYOND = "arXiv 2602.04879", "arXiv 2606.09821", "neither paper"
CLAIMS = {
    DPPO: (
        Claim("a trust region is needed", "dppo_binary_tv", "pg_is"),
        Claim("a divergence bounds better than a ratio", "dppo_binary_tv", "clip_higher"),
        Claim("the anchor must be the rollout policy", "dppo_binary_tv", "anchor_old"),
        Claim("small ratio caps collapse earlier", "cap_5", "cap_1.5", "mean"),
        Claim("clipping rare tokens costs speed", "clip_higher_relaxed", "clip_higher", "mean"),
        Claim("binary TV is as good as top-K TV", "dppo_binary_tv", "dppo_topk_tv", equal=True),
        Claim("binary KL is as good as top-K KL", "dppo_binary_kl", "dppo_topk_kl", equal=True),
        Claim("blocking large decreases on negatives suffices", "negative_only", "pg_is"),
        Claim("blocking them alone is as good as the mask", "negative_only", "dppo_binary_tv", equal=True),
    ),
    DRPO: (
        Claim("the smooth weight beats the mask at the published delta", "drpo", "dppo_binary_tv"),
        Claim("the smooth weight beats the mask at a delta that is a region", "drpo_tr", "dppo_binary_tv"),
        Claim("the size of the advantage belongs in the penalty", "drpo_tr", "drpo_tr_without_advantage"),
        Claim("the penalty on probabilities beats that on ratios", "drpo_tr", "spo"),
    ),
    BEYOND: (
        Claim("score centering alone suffices", "score_centering", "pg_is"),
        Claim("score centering adds to the mask", "dppo_score_centering", "dppo_binary_tv"),
        Claim("a bound after the step suffices", "pg_is_acceptance", "pg_is"),
        Claim("a bound after the step adds to the mask", "dppo_acceptance", "dppo_binary_tv"),
    ),
}


def differences(claim: Claim, rows: Sequence[StudyRow]) -> list[float]:
    """Return `ours` minus `theirs` for every seed that both methods have.

    A run without an evaluation failed before the first one and counts as 0.
    """
    ours, theirs = (
        {row.seed: _value(row, claim.measure) for row in rows if row.method == method}
        for method in (claim.ours, claim.theirs)
    )
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def bootstrap(values: Sequence[float]) -> Estimate | None:
    """Return the mean with its 95 % percentile bootstrap interval, or None for fewer than three values."""
    if len(values) < 3:
        return None
    drawn = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(np.asarray(values, float)[drawn].mean(axis=1), [0.025, 0.975])
    return Estimate(float(np.mean(values)), float(low), float(high))


def verdict(claim: Claim, found: Estimate | None) -> str:
    """Return the verdict of an interval by the rule of the study."""
    if found is None:
        return "not run"
    if claim.equal:
        confirmed, refuted = found.low > -MARGIN and found.high < MARGIN, found.low > MARGIN or found.high < -MARGIN
    else:
        confirmed, refuted = found.low > 0, found.high < 0
    return "confirmed" if confirmed else "refuted" if refuted else UNRESOLVED


def table(rows: Sequence[StudyRow]) -> Iterator[str]:
    """Yield the lines of the table of claims, from the rows of one condition."""
    head = "claim", "compared", "seeds", "difference, bootstrap", "Student's t", "collapsed", "of survivors"
    yield f"| {' | '.join((*head, 'adjusted p', 'verdict'))} |"
    yield "|---|---|---|---|---|---|---|---|---|"
    listed = [(source, claim) for source, claims in CLAIMS.items() for claim in claims]
    values = [differences(claim, rows) for _, claim in listed]
    run = {
        i: student_p(found, MARGIN if listed[i][1].equal else None) for i, found in enumerate(values) if len(found) > 2
    }
    adjusted = holm(run, len(listed))
    for i, (source, claim) in enumerate(listed):
        found, strict, p = bootstrap(values[i]), estimate(values[i]), "-"
        text = verdict(claim, found)
        if strict is not None:
            p = f"{adjusted[i]:.2g}"
            if text != UNRESOLVED and (adjusted[i] >= LEVEL or verdict(claim, strict) != text):
                text = f"{UNRESOLVED}; {text} only by the bootstrap"
        by = "as good as" if claim.equal else "over"
        compared = f"`{claim.ours}` {by} `{claim.theirs}`{', mean' if claim.measure == 'mean' else ''}"
        failed = [
            str(sum(row.collapsed for row in rows if row.method == method)) for method in (claim.ours, claim.theirs)
        ]
        alive = differences(claim, [row for row in rows if not row.collapsed])
        cells = _shown(found), _shown(strict).partition(" ")[2] or "-", ", ".join(failed), _survivors(alive), p, text
        yield f"| {' | '.join((f'{claim.text} ({source})', compared, str(len(values[i])), *cells))} |"


def _shown(found: Estimate | None) -> str:
    return "-" if found is None else f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def _survivors(values: Sequence[float]) -> str:
    """Return the mean difference of survivors, with Student's interval if they are three or more, and their number."""
    found = estimate(values)
    shown = f"{mean(values):+.3f}" if values and found is None else _shown(found)
    return f"{shown} ({len(values)})"


def _value(row: StudyRow, measure: str) -> float:
    values = [value if isfinite(value) else 0.0 for _, value in row.curve] or [0.0]
    return mean(values) if measure == "mean" else values[-1]
