"""A method in words."""

from __future__ import annotations

from .rules import negative_bounds
from .settings import ObjectiveSettings

_DIVERGENCES = {
    "ratio": "|r - 1|, the ratio of the sampled token (PPO's region)",
    "binary_tv": "binary total variation |mu(a) - pi(a)| of the sampled token",
    "binary_kl": "binary KL(mu || pi) of the sampled token against all others",
    "topk_tv": "total variation over the rollout's top K, the sampled token and the rest",
    "topk_kl": "KL(mu || pi) over the rollout's top K, the sampled token and the rest",
}
_POLICIES = {
    "rollout": "mu, the policy of the rollout engine",
    "old": "the old policy, the weights the step starts from, recomputed by the trainer",
}


def describe(name: str, s: ObjectiveSettings) -> str:
    """A few lines, one thing each. The first names the method and its policy term."""
    if s.supervised:
        lines = [f"objective {name}: negative log-likelihood of given tokens; no rollout policy, no trust region"]
    else:
        lines = [
            f"objective {name}: policy gradient A r grad ln pi(a); {_ratio(s)}",
            *_region(s),
            *_responses(s),
            *_batch(s),
            *_corrections(s),
        ]
    if s.reference_kl != "none":
        lines.append(
            f"  reference: + {s.reference_kl_coefficient:g} KL(pi || reference), estimator {s.reference_kl}, "
            f"{s.reference_kl_gradient} gradient"
        )
    if s.rollout_kl != "none":
        term = {"squared": "(ln r)^2", "k3": "(ln r + 1 / r - 1)"}[s.rollout_kl]
        share = " (1 - effective share)" if s.batch_statistic == "effective_size" else ""
        lines.append(f"  rollout policy: + {s.rollout_kl_coefficient:g}{share} {term} on every token, r = pi / mu")
    if s.entropy_coefficient:
        lines.append(f"  entropy: - {s.entropy_coefficient:g} entropy(pi)")
    return "\n".join(lines)


def axes(s: ObjectiveSettings) -> dict[str, str]:
    """The main axes as the cells of a table, "-" where one has no meaning. The same keys for every method."""
    region = s.has_region
    policies = {"rollout": "mu", "old": "old"}
    if not region:
        threshold = "-"
    elif s.measures_ratio:
        threshold = f"-{s.epsilon_low:g} +{s.epsilon_high:g}" + (f", dual {s.dual_clip:g}" if s.dual_clip else "")
    else:
        threshold = f"{s.delta:g}" + (f", penalty {s.penalty_delta:g}" if s.penalty_delta else "")
    ratio = "1" if s.importance == "none" else f"pi/{policies[s.importance]}"
    if s.ratio_level != "token":
        ratio += ", sequence" if s.ratio_level == "sequence" else f" {s.ratio_level.replace('_', ' ')}"
    if s.ratio_floor is not None or s.ratio_cap is not None:
        ratio += f" in [{_bound(s.ratio_floor, '0')}, {_bound(s.ratio_cap, 'inf')}]"
    return {
        "divergence": s.divergence if region else "-",
        "control": s.gate if s.control == "gate" else s.control,
        "direction": s.direction if s.control in ("mask", "mask_quadratic") else "-",
        "anchor": policies[s.anchor] if region else "-",
        "threshold": threshold,
        "ratio": ratio,
    }


def beside(s: ObjectiveSettings) -> list[str]:
    """What a method has beside the axes of the table, a few words each."""
    low, high = negative_bounds(s)
    by_sign = s.ratio_floor_negative is not None or s.ratio_cap_negative is not None
    whose = {"any": "", "harmful": ", harmful tokens", "negative": ", A < 0"}[s.response_sign]
    region = f"{s.response_region} {s.response_divergence} > {_bound(s.response_delta, '-')}{whose}"
    said = {
        "score centering": s.centering != "none",
        f"r in [{_bound(low, '0')}, {_bound(high, 'inf')}] where A < 0": by_sign,
        f"delta low {_bound(s.delta_low, '-')}": s.delta_low is not None,
        f"position weight {_bound(s.position_weight, '-')}": s.position_weight is not None,
        f"prefix budget {_bound(s.prefix_budget, '-')}": s.prefix_budget is not None,
        f"no region where mu < {_bound(s.exempt_below, '-')}": s.exempt_below is not None,
        f"responses of {region}": s.response_region != "none",
        f"{s.batch_statistic.replace('_', ' ')} of the batch": s.batch_statistic != "none",
        f"{s.mismatch} mismatch": s.mismatch != "none",
        f"rejection by {s.rejection}": s.rejection != "none",
        f"KL to mu, {s.rollout_kl_coefficient:g}": s.rollout_kl != "none",
    }
    return [words for words, holds in said.items() if holds]


def _ratio(s: ObjectiveSettings) -> str:
    if s.importance == "none":
        return "r = 1, no importance ratio"
    text = f"r = pi(a) / base(a), base = {_POLICIES[s.importance]}"
    text += {
        "token": "",
        "sequence": ", geometric mean over the response",
        "product": ", product over the response",
        "prefix_minimum": ", times the least r of the tokens before it in the response",
    }[s.ratio_level]
    bounds = [
        f"at least {s.ratio_floor:g}" if s.ratio_floor is not None else "",
        f"at most {s.ratio_cap:g}" if s.ratio_cap is not None else "",
    ]
    if s.ratio_floor_negative is not None or s.ratio_cap_negative is not None:
        low, high = negative_bounds(s)
        bounds.append(f"where A < 0 [{_bound(low, '0')}, {_bound(high, 'inf')}]")
    if s.batch_statistic == "effective_size":
        bounds.append("at most the batch's effective share of samples")
    if any(bounds):
        kept = "loses its gradient" if s.path == "ratio" else "keeps its gradient"
        return text + f", truncated to {' and '.join(b for b in bounds if b)} (a truncated token {kept})"
    return text + ", not capped"


def _region(s: ObjectiveSettings) -> list[str]:
    if s.control == "none":
        return ["  trust region: none"]
    if s.control == "gate":
        return ["  trust region: none, a smooth weight instead", f"  control: {_gate(s)}"]
    lines = [f"  trust region: {_DIVERGENCES[s.divergence]}; anchor: {_POLICIES[s.anchor]}"]
    if s.measures_ratio:
        threshold = f"r outside [{1 - s.epsilon_low:g}, {1 + s.epsilon_high:g}]"
    else:
        threshold = f"D > delta = {s.delta:g}"
        if s.delta_low is not None:
            threshold += f" ({s.delta_low:g} where r < 1)"
    tail = f", tail {s.tail}"
    side = {
        "sampled": "and it is moving away (A > 0 and r > 1, or A < 0 and r < 1)",
        "predictive": f"and the update would raise D (A times the predicted change > 0{tail})",
        "symmetric": "whatever the sign of A",
        "negative": "and A < 0 and r < 1",
    }[s.direction]
    lines += _positions(s)
    if s.control == "mask":
        lines.append(f"  control: a token loses its gradient when {threshold} {side}")
        if s.dual_clip is not None:
            lines.append(f"  dual clip: and when A < 0 and r > {s.dual_clip:g}")
        return lines
    if s.measures_ratio:
        scale = f"/ (2 epsilon), epsilon = {s.epsilon_low:g} below and {s.epsilon_high:g} above"
    else:
        scale = f"/ (2 delta), delta = {s.penalty_delta or s.delta:g}"
    what = {
        "ratio": "the ratio",
        "binary_tv": "the sampled token's probability",
        "topk_tv": "the probability of every top-K token (ours, experimental)",
    }[s.divergence]
    where = "on every token" if s.control == "quadratic" else f"where {threshold} {side}"
    if s.penalty == "l2" and s.penalty_weight == "advantage":
        lines.append(f"  control: quadratic penalty on the shift of {what}, times |A| {scale}, {where}")
    else:
        by = "|A| / delta" if s.penalty_weight == "advantage" else "1 / delta"
        lines.append(
            f"  control: penalty on {what} by {s.penalty}, times {by}, delta = {s.penalty_delta or s.delta:g}, {where}"
        )
    if s.divergence == "binary_tv" and (s.penalty_delta or s.delta) >= 1:
        lines.append("  note: with delta >= 1 the gradient weight never reaches zero: damping, not a trust region")
    return lines


def _positions(s: ObjectiveSettings) -> list[str]:
    lines = []
    if s.position_weight is not None:
        lines.append(f"  position: D counts in full at the start of a response, times {s.position_weight:g} at its end")
    if s.prefix_budget is not None:
        most = (s.prefix_budget_ceiling or 2) * s.prefix_budget
        budget = f"{s.prefix_budget:g}, or up to {most:g} by the response's own D"
        lines.append(f"  prefix: the threshold shrinks where D before the token averages above {budget}")
    if s.free_low is not None or s.free_high is not None:
        lines.append(f"  free: tokens with r in [{1 - (s.free_low or 0):g}, {1 + (s.free_high or 0):g}]")
    if s.exempt_below is not None:
        side = {"both": "", "low": " and r < 1", "high": " and r > 1"}[s.exempt_side]
        lines.append(f"  exempt: tokens with mu < {s.exempt_below:g}{side}")
    return lines


def _gate(s: ObjectiveSettings) -> str:
    if s.gate == "sigmoid":
        tau = f"{s.gate_positive:g} where A > 0, {s.gate_negative:g} where A < 0"
        return f"4 sigma (1 - sigma), sigma of tau (r - 1), tau = {tau} (SAPO)"
    if s.gate == "gaussian":
        return (
            f"a Gaussian of r - 1 where the token diverges, width {s.gate_width:g} / mu^{s.gate_mass_power:g} up to "
            f"{s.gate_width_max:g}, by 1 + {s.gate_positive:g} A, 1 / (1 - {s.gate_negative:g} A) where A < 0 (MASPO)"
        )
    if s.gate == "inverse":
        return (
            f"1 / r where A > 0, r where A < 0, at most {s.dual_clip:g}; no gradient where A > 0 and r > "
            f"{1 + s.epsilon_high:g}, or A < 0 and r < {1 - s.epsilon_low:g} (ASPO)"
        )
    return (
        f"r^k exp(lambda (1 - r)) in place of r, k = {s.gate_power_positive:g}, lambda = {s.gate_positive:g}; where "
        f"A < 0 {s.gate_power_negative:g}, {s.gate_negative:g} (VESPO)"
    )


def _responses(s: ObjectiveSettings) -> list[str]:
    lines = []
    if s.response_region != "none":
        of = {"mean": "mean", "max": "largest"}[s.response_region]
        whose = {
            "any": "all tokens of a response are dropped",
            "harmful": "the tokens of a response that diverge further are dropped",
            "negative": "all tokens of a response with A < 0 are dropped",
        }[s.response_sign]
        lines.append(f"  responses: {whose} when its {of} {s.response_divergence} is above {s.response_delta:g}")
    if s.centering != "none":
        lines.append("  centering: minus A times the score that mu expects, over the engine's list and a modelled tail")
    return lines


def _batch(s: ObjectiveSettings) -> list[str]:
    if not s.batch_statistic.startswith("second_moment"):
        return []
    square, kept = "its square", ""
    if s.batch_statistic == "second_moment_clip":
        square, kept = "the square, those clipped at the bound included,", ", but none with old / mu within [0.7, 1.5]"
    return [
        "  batch: of the tokens that move away (A > 0 and old > mu, or A < 0 and old < mu) those with the largest "
        f"|ln old / mu| are dropped until the mean of {square} over the batch is below {s.second_moment_budget:g}{kept}"
    ]


def _corrections(s: ObjectiveSettings) -> list[str]:
    lines = []
    low, high = _bound(s.mismatch_low, "0"), _bound(s.mismatch_high, "inf")
    if s.mismatch == "truncate":
        lines.append(f"  mismatch: weighted by min(trainer / engine, {high}), {s.mismatch_level} level (TIS)")
    elif s.mismatch == "mask":
        lines.append(
            f"  mismatch: a token is dropped where trainer / engine leaves [{low}, {high}], "
            f"{s.mismatch_level} level (IcePop)"
        )
    if s.rejection != "none":
        low, high = _bound(s.rejection_low, "0"), _bound(s.rejection_high, "inf")
        of = {"geometric": "geometric mean", "sequence": "product", "any_token": "of any of its tokens"}[s.rejection]
        lines.append(f"  rejection: a response is dropped when trainer / engine ({of}) leaves [{low}, {high}]")
    if s.drops_outliers:
        low, high = _bound(s.outlier_low, "0"), _bound(s.outlier_high, "inf")
        lines.append(f"  outliers: a response is dropped when trainer / engine of any token leaves [{low}, {high}]")
    return lines


def _bound(value: float | None, absent: str) -> str:
    return absent if value is None else f"{value:g}"
