"""Which combinations of axes make sense: what each axis belongs to, and what excludes what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _masks(s: Any) -> bool:
    return s.control in ("mask", "mask_quadratic")


def _masks_by_mass(s: Any) -> bool:
    return _masks(s) and not s.measures_ratio


def _gated(s: Any, gate: str) -> bool:
    return s.control == "gate" and s.gate == gate


def _bounds_ratio(s: Any) -> bool:
    return (s.has_region and s.measures_ratio) or _gated(s, "inverse")


def _penalises_sampled(s: Any) -> bool:
    return "quadratic" in s.control and s.divergence == "binary_tv"


def _has_response_region(s: Any) -> bool:
    return s.response_region != "none"


def _has_importance(s: Any) -> bool:
    return s.importance != "none"


# Axes that only some combinations read. A preset's own value goes back to the default when an override takes
# away what it belonged to; one that the user wrote is an error, never silently without effect.
CONDITIONAL = (
    (
        "delta",
        lambda s: s.has_region and not s.measures_ratio,
        "is the threshold of a TV or KL divergence; the ratio's bounds are epsilon_low and epsilon_high",
    ),
    (
        "epsilon_low",
        _bounds_ratio,
        "bounds the ratio; the threshold of a TV or KL divergence is delta",
    ),
    (
        "epsilon_high",
        _bounds_ratio,
        "bounds the ratio; the threshold of a TV or KL divergence is delta",
    ),
    (
        "penalty_delta",
        lambda s: s.control == "mask_quadratic" and not s.measures_ratio,
        "belongs to control='mask_quadratic' on a TV divergence; the ratio's penalty is scaled by its bounds",
    ),
    (
        "dual_clip",
        lambda s: (s.control == "mask" and s.measures_ratio) or _gated(s, "inverse"),
        "belongs to a mask on divergence='ratio' and to gate='inverse'",
    ),
    ("anchor", lambda s: s.has_region, "is the centre of a trust region, and control is 'none' or 'gate'"),
    ("direction", _masks, "belongs to a mask"),
    ("delta_low", _masks_by_mass, "belongs to a mask by a TV or KL divergence"),
    ("position_weight", _masks_by_mass, "belongs to a mask by a TV or KL divergence"),
    ("prefix_budget", _masks_by_mass, "belongs to a mask by a TV or KL divergence"),
    ("prefix_budget_ceiling", lambda s: s.prefix_budget is not None, "belongs to prefix_budget"),
    ("free_low", _masks_by_mass, "belongs to a mask by a TV or KL divergence"),
    ("free_high", _masks_by_mass, "belongs to a mask by a TV or KL divergence"),
    ("exempt_below", _masks, "exempts tokens from a mask"),
    ("exempt_side", lambda s: s.exempt_below is not None, "belongs to exempt_below"),
    ("penalty", _penalises_sampled, "belongs to a quadratic control on binary_tv"),
    ("penalty_weight", _penalises_sampled, "belongs to a quadratic control on binary_tv"),
    ("gate", lambda s: s.control == "gate", "belongs to control='gate'"),
    ("gate_positive", lambda s: s.control == "gate" and s.gate != "inverse", "is of the other gates than 'inverse'"),
    ("gate_negative", lambda s: s.control == "gate" and s.gate != "inverse", "is of the other gates than 'inverse'"),
    ("gate_power_positive", lambda s: _gated(s, "gamma"), "belongs to gate='gamma'"),
    ("gate_power_negative", lambda s: _gated(s, "gamma"), "belongs to gate='gamma'"),
    ("gate_width", lambda s: _gated(s, "gaussian"), "belongs to gate='gaussian'"),
    ("gate_width_max", lambda s: _gated(s, "gaussian"), "belongs to gate='gaussian'"),
    ("gate_mass_power", lambda s: _gated(s, "gaussian"), "belongs to gate='gaussian'"),
    ("response_divergence", _has_response_region, "belongs to response_region"),
    ("response_delta", _has_response_region, "belongs to response_region"),
    ("response_sign", _has_response_region, "belongs to response_region"),
    ("ratio_cap_negative", _has_importance, "needs an importance ratio"),
    ("ratio_floor_negative", _has_importance, "needs an importance ratio"),
    ("second_moment_budget", lambda s: s.batch_statistic.startswith("second_moment"), "belongs to batch_statistic"),
    ("tail", lambda s: s.direction == "predictive", "belongs to direction='predictive'"),
    ("ratio_cap", _has_importance, "needs an importance ratio"),
    ("ratio_floor", _has_importance, "needs an importance ratio"),
    ("ratio_level", _has_importance, "needs an importance ratio"),
    ("gradient_path", _has_importance, "needs an importance ratio"),
    ("mismatch_high", lambda s: s.mismatch != "none", "belongs to mismatch='truncate' or 'mask'"),
    ("mismatch_low", lambda s: s.mismatch == "mask", "belongs to mismatch='mask'"),
    ("mismatch_level", lambda s: s.mismatch != "none", "belongs to mismatch='truncate' or 'mask'"),
    ("reference_kl_gradient", lambda s: s.reference_kl != "none", "belongs to reference_kl"),
    ("rejection_low", lambda s: s.rejection != "none", "belongs to rejection"),
    ("rejection_high", lambda s: s.rejection != "none", "belongs to rejection"),
)


def combination_problems(s: Any, defaults: Mapping[str, Any]) -> list[str]:
    """Everything about the combination `s` that makes no sense or leaves an axis without effect, one sentence each."""
    problems = [
        f"{name}={getattr(s, name)!r} has no effect in this combination: it {why}"
        for name, applies, why in CONDITIONAL
        if getattr(s, name) != defaults[name] and not applies(s)
    ]

    def refuse(when: bool, text: str) -> None:
        if when:
            problems.append(text)

    region = s.has_region
    refuse(
        region and not s.measures_ratio and s.delta is None,
        f"divergence={s.divergence!r} with control={s.control!r} needs a threshold: set delta",
    )
    constant = (s.position_weight, s.prefix_budget) == (None, None)
    refuse(
        _masks(s) and s.divergence.endswith("_tv") and constant and (s.delta or 0) >= 1,
        f"delta={s.delta} masks no token, because a total variation is at most 1: use a value below 1",
    )
    refuse(
        region and s.measures_ratio and (s.epsilon_low is None or s.epsilon_high is None),
        f"divergence='ratio' with control={s.control!r} needs bounds: set epsilon_low and epsilon_high",
    )
    refuse(
        "quadratic" in s.control and s.divergence in ("binary_kl", "topk_kl"),
        f"control={s.control!r} is a quadratic in the shift of a probability or a ratio: divergence must be "
        f"'ratio', 'binary_tv' or 'topk_tv', not {s.divergence!r}",
    )
    refuse(
        s.ratio_level != "token" and region and not (s.measures_ratio and s.direction != "predictive"),
        f"ratio_level={s.ratio_level!r} has a trust region for divergence='ratio' only, and no predictive direction",
    )
    refuse(
        s.dual_clip is not None and s.epsilon_high is not None and s.dual_clip <= 1 + s.epsilon_high,
        f"dual_clip={s.dual_clip} must be above 1 + epsilon_high",
    )
    refuse(
        s.ratio_cap is not None and s.ratio_floor is not None and s.ratio_floor > s.ratio_cap,
        f"ratio_floor={s.ratio_floor} is above ratio_cap={s.ratio_cap}",
    )
    for name in ("mismatch", "rejection", "outlier"):
        low, high = getattr(s, f"{name}_low"), getattr(s, f"{name}_high")
        refuse(
            low is not None and high is not None and low > high,
            f"{name}_low={low} is above {name}_high={high}: nothing would be kept",
        )
    low, high = negative_bounds(s)
    refuse(
        low is not None and high is not None and low > high,
        f"where A < 0 the floor of r, {low}, is above its cap, {high}: set ratio_floor_negative and ratio_cap_negative",
    )
    refuse(
        s.supervised and (s.importance != "none" or s.control != "none" or _reads_rollout(s)),
        "supervised=true has no rollout policy: importance, control, mismatch and rejection must be 'none', and so "
        "must what else compares with it",
    )
    refuse(
        s.mismatch == "truncate" and s.importance != "old",
        "mismatch='truncate' multiplies a ratio taken to the old policy: set importance='old', "
        "or truncate r = pi / mu itself with ratio_cap",
    )
    refuse(
        s.mismatch != "none" and s.importance == "none",
        "mismatch needs an importance ratio: importance is 'none'",
    )
    refuse(s.mismatch != "none" and s.mismatch_high is None, f"mismatch={s.mismatch!r} needs mismatch_high")
    refuse(
        s.rejection != "none" and s.rejection_low is None and s.rejection_high is None,
        f"rejection={s.rejection!r} needs rejection_low or rejection_high",
    )
    refuse(
        (s.reference_kl == "none") != (s.reference_kl_coefficient == 0),
        "reference_kl and reference_kl_coefficient go together: set both, or neither",
    )
    refuse(
        (s.rollout_kl == "none") != (s.rollout_kl_coefficient == 0),
        "rollout_kl and rollout_kl_coefficient go together: set both, or neither",
    )
    refuse(
        s.rejection == "any_token" and s.drops_outliers,
        "rejection='any_token' is what outlier_low and outlier_high add to another rejection: set one of the two",
    )
    refuse(
        s.response_region != "none" and s.response_delta is None,
        f"response_region={s.response_region!r} needs response_delta",
    )
    refuse(
        s.response_region != "none" and s.response_divergence in ("topk_tv", "topk_kl") and s.anchor == "old",
        f"response_divergence={s.response_divergence!r} is measured from mu, whose top K anchor='old' replaces: use "
        "a response_divergence of the sampled token",
    )
    refuse(
        s.batch_statistic.startswith("second_moment") and s.second_moment_budget is None,
        f"batch_statistic={s.batch_statistic!r} needs second_moment_budget",
    )
    refuse(
        s.batch_statistic == "effective_size" and s.importance == "none",
        "batch_statistic='effective_size' caps an importance ratio: importance is 'none'",
    )
    problems += _gate_problems(s) + _centering_problems(s)
    return problems


def negative_bounds(s: Any) -> tuple[float | None, float | None]:
    """(floor, cap) of r where A < 0."""
    low = s.ratio_floor if s.ratio_floor_negative is None else s.ratio_floor_negative
    return low, s.ratio_cap if s.ratio_cap_negative is None else s.ratio_cap_negative


def _gate_problems(s: Any) -> list[str]:
    if s.control != "gate":
        return []
    needs = {
        "sigmoid": ("gate_positive", "gate_negative"),
        "gaussian": ("gate_positive", "gate_negative", "gate_width", "gate_width_max", "gate_mass_power"),
        "inverse": ("epsilon_low", "epsilon_high", "dual_clip"),
        "gamma": ("gate_positive", "gate_negative", "gate_power_positive", "gate_power_negative"),
    }[s.gate]
    problems = []
    if missing := [name for name in needs if getattr(s, name) is None]:
        problems.append(f"gate={s.gate!r} needs {', '.join(missing)}")
    if s.gate_width is not None and s.gate_width_max is not None and s.gate_width > s.gate_width_max:
        problems.append(f"gate_width={s.gate_width} is above gate_width_max={s.gate_width_max}")
    if s.importance == "none":
        problems.append("control='gate' weighs an importance ratio: importance is 'none'")
    return problems


def _centering_problems(s: Any) -> list[str]:
    if s.centering == "none":
        return []
    what = "centering='policy' weighs every token of the engine's list as if it had been sampled"
    problems = []
    if s.importance == "old" or (s.has_region and s.anchor == "old"):
        problems.append(f"{what}, against mu: importance and anchor cannot be 'old'")
    if s.ratio_level != "token" or (s.mismatch != "none" and s.mismatch_level != "token"):
        problems.append(f"{what}: ratio_level and mismatch_level must be 'token'")
    if _masks(s) and (s.divergence in ("topk_tv", "topk_kl") or s.direction == "predictive"):
        problems.append(f"{what}: its D must be that of one token, divergence 'binary_tv', 'binary_kl' or 'ratio'")
    undecided = (
        s.position_weight is not None or s.prefix_budget is not None or s.batch_statistic.startswith("second_moment")
    )
    if undecided or (s.response_region != "none" and s.response_sign == "harmful"):
        problems.append(
            f"{what}: position_weight, prefix_budget, second_moment and response_sign='harmful' cannot judge it alone"
        )
    weighs = s.truncates or s.control in ("mask", "gate") or s.mismatch == "mask"
    if s.importance == "rollout" and not weighs:
        problems.append(
            "centering='policy' has no effect: pi / mu, neither truncated nor masked, expects a score of zero already"
        )
    return problems


def _reads_rollout(s: Any) -> bool:
    chosen = (s.mismatch, s.rejection, s.response_region, s.rollout_kl, s.centering, s.batch_statistic)
    return any(choice != "none" for choice in chosen) or s.drops_outliers
