"""The claims that the study asks about, and what its stored rows say to each. Written before the runs.

Each claim compares two methods, paired by seed: by where the metric ended, or by its mean over all evaluations, which
speed and early collapse show in. It is confirmed where the 95 % bootstrap interval of the difference lies above 0, and
refuted where it lies below. That two methods are as good as each other is confirmed where the interval lies within 5
points of 0, and refuted where it lies beyond them. All else is not resolved at this scale.

Beside it stands Student's interval, added when the first runs had ended and deciding nothing: the bootstrap of so few
seeds is too narrow (of three it is their range).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import mean, stdev
from typing import Literal

from dppo_megatron.study.rows import StudyRow
from dppo_megatron.study.verdicts import Estimate, estimate

MARGIN = 0.05
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile of t by the number of values


@dataclass(frozen=True)
class Claim:
    """`ours` ends above `theirs`, or as high."""

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
    """Ours minus theirs, in every seed that both have.

    A run without an evaluation counts as 0, for it failed before the first.
    """
    ours, theirs = (
        {row.seed: _value(row, claim.measure) for row in rows if row.method == method}
        for method in (claim.ours, claim.theirs)
    )
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def verdict(claim: Claim, found: Estimate | None) -> str:
    if found is None:
        return "not run"
    if claim.equal:
        confirmed, refuted = found.low > -MARGIN and found.high < MARGIN, found.low > MARGIN or found.high < -MARGIN
    else:
        confirmed, refuted = found.low > 0, found.high < 0
    return "confirmed" if confirmed else "refuted" if refuted else "not resolved at this scale"


def table(rows: Sequence[StudyRow]) -> Iterator[str]:
    """A line for each claim, from the rows of one condition."""
    yield "| claim | compared | seeds | difference, bootstrap | Student's t | verdict |"
    yield "|---|---|---|---|---|---|"
    for source, claims in CLAIMS.items():
        for claim in claims:
            values = differences(claim, rows)
            found = estimate(values)
            shown, student = "-", "-"
            if found is not None:
                half = STUDENT[len(values)] * stdev(values) / sqrt(len(values))
                shown = f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
                student = f"[{found.mean - half:+.3f}, {found.mean + half:+.3f}]"
            by = "as good as" if claim.equal else "over"
            compared = f"`{claim.ours}` {by} `{claim.theirs}`{', mean' if claim.measure == 'mean' else ''}"
            line = f"{claim.text} ({source})", compared, str(len(values)), shown, student, verdict(claim, found)
            yield f"| {' | '.join(line)} |"


def _value(row: StudyRow, measure: str) -> float:
    values = [value if isfinite(value) else 0.0 for _, value in row.curve] or [0.0]
    return mean(values) if measure == "mean" else values[-1]
