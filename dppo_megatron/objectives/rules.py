"""Check which combinations of axes make sense.

If only some choices use an axis, the axis names its branch in `settings.py`, as if nested under that choice: `delta`
belongs to "mass region", `tail` to "predictive". Setting an axis while the branch does not apply is an error, and so is
a missing required axis. `combination_problems` adds the conflicts between axes of different branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Branch -> (condition on the settings, name in messages).
BRANCHES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "region": (lambda s: s.has_region, "a trust region, which control='none' and control='gate' do not have"),
    "mass region": (
        lambda s: s.has_region and not s.measures_ratio,
        "a region by a TV or KL divergence; bounds of the ratio are epsilon_low and epsilon_high",
    ),
    "ratio bounds": (
        lambda s: (s.has_region and s.measures_ratio) or _gated(s, "inverse"),
        "divergence='ratio' and gate='inverse'; the threshold of a TV or KL divergence is delta",
    ),
    "mask": (lambda s: s.masks, "a mask"),
    "mass mask": (lambda s: s.masks and not s.measures_ratio, "a mask by a TV or KL divergence"),
    "second scale": (
        lambda s: s.control == "mask_quadratic" and not s.measures_ratio,
        "control='mask_quadratic' on a TV divergence; the penalty of the ratio is scaled by its bounds",
    ),
    "dual clip": (
        lambda s: (s.control == "mask" and s.measures_ratio) or _gated(s, "inverse"),
        "a mask on divergence='ratio', and gate='inverse'",
    ),
    "sampled penalty": (
        lambda s: "quadratic" in s.control and s.divergence == "binary_tv",
        "a quadratic control on binary_tv",
    ),
    "predictive": (lambda s: s.direction == "predictive", "direction='predictive'"),
    "prefix budget": (lambda s: s.prefix_budget is not None, "prefix_budget"),
    "exemption": (lambda s: s.exempt_below is not None, "exempt_below"),
    "gate": (lambda s: s.control == "gate", "control='gate'"),
    "signed gate": (lambda s: s.control == "gate" and s.gate != "inverse", "the gates other than 'inverse'"),
    "gaussian gate": (lambda s: _gated(s, "gaussian"), "gate='gaussian'"),
    "gamma gate": (lambda s: _gated(s, "gamma"), "gate='gamma'"),
    "response region": (lambda s: s.response_region != "none", "response_region"),
    "ratio": (lambda s: s.importance != "none", "an importance ratio, and importance is 'none'"),
    "second moment": (
        lambda s: s.batch_statistic.startswith("second_moment"),
        "batch_statistic='second_moment' and 'second_moment_clip'",
    ),
    "mismatch": (lambda s: s.mismatch != "none", "mismatch='truncate' or 'mask'"),
    "mismatch mask": (lambda s: s.mismatch == "mask", "mismatch='mask'"),
    "rejection": (lambda s: s.rejection != "none", "rejection"),
    "reference": (lambda s: s.reference_kl != "none", "reference_kl"),
    "rollout": (lambda s: s.rollout_kl != "none", "rollout_kl"),
    "distillation": (lambda s: s.distillation != "none", "distillation"),
    "distillation schedule": (lambda s: s.distillation_steps is not None, "distillation_steps"),
    "jensen shannon": (lambda s: s.distillation == "jensen_shannon", "distillation='jensen_shannon'"),
}
_BOUNDS = (
    ("ratio_floor", "ratio_cap"),
    ("mismatch_low", "mismatch_high"),
    ("rejection_low", "rejection_high"),
    ("outlier_low", "outlier_high"),
    ("gate_width", "gate_width_max"),
)


def combination_problems(s: Any, axes: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each problem with the combination `s`. axes: name -> field of `ObjectiveSettings`."""
    return [*_branch_problems(s, axes), *_conflicts(s)]


def _branch_problems(s: Any, axes: Mapping[str, Any]) -> Iterator[str]:
    for name, field in axes.items():
        value, branch = getattr(s, name), field.metadata["of"]
        if branch is None:
            continue
        applies, words = BRANCHES[branch]
        if value != field.default and not applies(s):
            yield f"{name}={value!r} has no effect in this combination: it belongs to {words}"
        if field.metadata.get("required") and not value and applies(s):
            yield f"{name}={value!r}: {words.partition(';')[0]} needs it; set {name}, {field.metadata['doc']}"


def _conflicts(s: Any) -> Iterator[str]:
    """Yield the conflicts that no branch excludes."""
    for low, high in _BOUNDS:
        lower, upper = getattr(s, low), getattr(s, high)
        if lower is not None and upper is not None and lower > upper:
            yield f"{low}={lower} is above {high}={upper}: nothing would be kept"
    lower, upper = negative_bounds(s)
    if lower is not None and upper is not None and lower > upper:
        yield (
            f"where A < 0 the floor of r, {lower}, is above its cap, {upper}: set ratio_floor_negative and "
            "ratio_cap_negative"
        )
    constant = s.position_weight is None and s.prefix_budget is None
    if s.masks and s.divergence.endswith("_tv") and constant and (s.delta or 0) >= 1:
        yield f"delta={s.delta} masks no token, because a total variation is at most 1: use a value below 1"
    if "quadratic" in s.control and s.divergence in ("binary_kl", "kl_either", "topk_kl"):
        yield (
            f"control={s.control!r} is a quadratic in the shift of a probability or a ratio: divergence must be "
            f"'ratio', 'binary_tv' or 'topk_tv', not {s.divergence!r}"
        )
    if s.ratio_level != "token" and s.has_region and not (s.measures_ratio and s.direction != "predictive"):
        yield (
            f"ratio_level={s.ratio_level!r} has a trust region for divergence='ratio' only, and no predictive direction"
        )
    if s.dual_clip is not None and s.epsilon_high is not None and s.dual_clip <= 1 + s.epsilon_high:
        yield f"dual_clip={s.dual_clip} must be above 1 + epsilon_high"
    if _gated(s, "inverse") and s.dual_clip is None:
        yield "gate='inverse' needs dual_clip: set it to the largest weight"
    if s.importance == "none" and s.control == "gate":
        yield "control='gate' weighs an importance ratio: importance is 'none'"
    if s.importance == "none" and s.batch_statistic == "effective_size":
        yield "batch_statistic='effective_size' caps an importance ratio: importance is 'none'"
    if s.mismatch == "truncate" and s.importance != "old":
        yield (
            "mismatch='truncate' multiplies a ratio taken to the old policy: set importance='old', or truncate "
            "r = pi / mu itself with ratio_cap"
        )
    if s.rejection != "none" and s.rejection_low is None and s.rejection_high is None:
        yield f"rejection={s.rejection!r} needs rejection_low or rejection_high"
    if s.rejection == "any_token" and s.drops_outliers:
        yield "rejection='any_token' and outlier_low, outlier_high reject for the same reason: set one of the two"
    if s.response_region != "none" and s.response_divergence in ("topk_tv", "topk_kl") and s.anchor == "old":
        yield (
            f"response_divergence={s.response_divergence!r} is measured from mu, whose top K anchor='old' replaces: "
            "use a response_divergence of the sampled token"
        )
    if s.rollout_kl == "topk_squared" and s.has_region and s.anchor == "old":
        yield "rollout_kl='topk_squared' is measured from mu, whose top K anchor='old' replaces: use 'squared'"
    rollout_axes = (s.importance, s.control, s.mismatch, s.rejection, s.response_region, s.rollout_kl, s.centering)
    if s.supervised and (set(rollout_axes) | {s.batch_statistic, s.distillation} != {"none"} or s.drops_outliers):
        yield (
            "supervised=true has no rollout policy: importance, control, mismatch and rejection must be 'none', and so "
            "must every other axis that compares with it"
        )
    if s.jensen_shannon_weight >= 1:
        yield f"jensen_shannon_weight={s.jensen_shannon_weight} must be below 1: at 1 the mixture is the teacher itself"
    if s.centering != "none":
        yield from _centering_conflicts(s)


def _centering_conflicts(s: Any) -> Iterator[str]:
    reason = "centering='policy' weighs every token of the engine's list as if it had been sampled"
    if s.importance == "old" or (s.has_region and s.anchor == "old"):
        yield f"{reason}, against mu: importance and anchor cannot be 'old'"
    if s.ratio_level != "token" or (s.mismatch != "none" and s.mismatch_level != "token"):
        yield f"{reason}: ratio_level and mismatch_level must be 'token'"
    if s.masks and (s.divergence in ("topk_tv", "topk_kl") or s.direction == "predictive"):
        yield f"{reason}: its D must be that of one token, divergence 'binary_tv', 'binary_kl' or 'ratio'"
    undecided = s.position_weight is not None or s.prefix_budget is not None or BRANCHES["second moment"][0](s)
    if undecided or (s.response_region != "none" and s.response_sign == "harmful"):
        yield (
            f"{reason}: position_weight, prefix_budget, second_moment and response_sign='harmful' read other tokens too"
        )
    if s.distillation == "sampled":
        yield f"{reason} with the same A, which distillation='sampled' gives only the sampled token: use a divergence"
    if s.importance == "rollout" and not (s.truncates or s.control in ("mask", "gate") or s.mismatch == "mask"):
        yield "centering='policy' has no effect: without a cap or a mask, pi / mu has an expected score of zero already"


def negative_bounds(s: Any) -> tuple[float | None, float | None]:
    """Return (floor, cap) of r where A < 0."""
    low = s.ratio_floor if s.ratio_floor_negative is None else s.ratio_floor_negative
    return low, s.ratio_cap if s.ratio_cap_negative is None else s.ratio_cap_negative


def _gated(s: Any, gate: str) -> bool:
    return s.control == "gate" and s.gate == gate
