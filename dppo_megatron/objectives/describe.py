"""Describe a method in words."""

from __future__ import annotations

from collections.abc import Iterator

from .rules import negative_bounds
from .settings import ObjectiveSettings

_DIVERGENCES = {
    "ratio": "|r - 1|, the ratio of the sampled token (PPO's region)",
    "binary_tv": "binary total variation |mu(a) - pi(a)| of the sampled token",
    "binary_kl": "binary KL(mu || pi) of the sampled token against all others",
    "kl_either": "the larger of the binary KL(mu || pi) and KL(pi || mu) of the sampled token",
    "topk_tv": "total variation over the rollout's top K, the sampled token and the rest",
    "topk_kl": "KL(mu || pi) over the rollout's top K, the sampled token and the rest",
}
_POLICIES = {
    "rollout": "mu, the policy of the rollout engine",
    "old": "the old policy, the weights the step starts from, recomputed by the trainer",
}
_LEVELS = {
    "token": "",
    "sequence": ", geometric mean over the response",
    "product": ", product over the response",
    "prefix_minimum": ", times the least r of the tokens before it in the response",
}
_DIRECTIONS = {
    "sampled": "and it is moving away (A > 0 and r > 1, or A < 0 and r < 1)",
    "predictive": "and the update would raise D (A times the predicted change > 0, tail {s.tail})",
    "symmetric": "for either sign of A",
    "negative": "and A < 0 and r < 1",
}
_PENALISED = {
    "ratio": "the ratio",
    "binary_tv": "the sampled token's probability",
    "topk_tv": "the probability of every top-K token (ours, experimental)",
}
_GATES = {
    "sigmoid": "4 sigma (1 - sigma), sigma of tau (r - 1), tau = {s.gate_positive:g} where A > 0, {s.gate_negative:g} "
    "where A < 0 (SAPO)",
    "gaussian": "a Gaussian of r - 1 where the token diverges, width {s.gate_width:g} / mu^{s.gate_mass_power:g} up to "
    "{s.gate_width_max:g}, by 1 + {s.gate_positive:g} A, 1 / (1 - {s.gate_negative:g} A) where A < 0 (MASPO)",
    "inverse": "1 / r where A > 0, r where A < 0, at most {s.dual_clip:g}; no gradient where A > 0 and r > {above:g}, "
    "or A < 0 and r < {below:g} (ASPO)",
    "gamma": "r^k exp(lambda (1 - r)) in place of r, k = {s.gate_power_positive:g}, lambda = {s.gate_positive:g}; "
    "where A < 0 {s.gate_power_negative:g}, {s.gate_negative:g} (VESPO)",
}
_RESPONSES = {
    "any": "all tokens of a response are dropped",
    "harmful": "the tokens of a response that diverge further are dropped",
    "negative": "all tokens of a response with A < 0 are dropped",
}
_SHIFTS = {  # completes "masks tokens whose ..."
    "ratio": "ratio to {base} probability leaves [{below:g}, {above:g}]",
    "binary_tv": "probability moves by more than {s.delta:g} from {base}",
    "binary_kl": "binary KL from {base} probability exceeds {s.delta:g}",
    "kl_either": "binary KL from or to {base} probability exceeds {s.delta:g}",
    "topk_tv": "top-K total variation from {base} exceeds {s.delta:g}",
    "topk_kl": "top-K KL from {base} exceeds {s.delta:g}",
}
_BATCH = (
    "  batch: tokens that move away (A > 0 and old > mu, or A < 0 and old < mu) are dropped, those with the largest "
    "|ln old / mu| first, until the mean of {square} over the batch is below {budget:g}{kept}"
)


def describe(name: str, s: ObjectiveSettings) -> str:
    """Describe a method in a few lines. The first summarizes the method, and each later line covers one part."""
    return "\n".join(_lines(name, s))


def _lines(name: str, s: ObjectiveSettings) -> Iterator[str]:
    if s.supervised:
        yield f"objective {name}: negative log-likelihood of given tokens; no rollout policy, no trust region"
    else:
        yield f"objective {name}: {'; '.join([_in_short(s), *additions(s)])}"
        yield f"  policy gradient: A r grad ln pi(a); {_ratio(s)}"
        yield from _region(s)
        yield from _corrections(s)
    if s.reference_kl != "none":
        yield (
            f"  reference: + {s.reference_kl_coefficient:g} KL(pi || reference), estimator {s.reference_kl}, "
            f"{s.reference_kl_gradient} gradient"
        )
    if s.rollout_kl != "none":
        term = {
            "squared": "(ln r)^2",
            "k3": "(ln r + 1 / r - 1)",
            "topk_squared": "E_mu (ln r)^2, over the top K, the sampled token and the rest,",
        }[s.rollout_kl]
        share = " (1 - effective share)" if s.batch_statistic == "effective_size" else ""
        yield f"  rollout policy: + {s.rollout_kl_coefficient:g}{share} {term} on every token, r = pi / mu"
    if s.distillation != "none":
        weight = f"{s.distillation_coefficient:g}"
        limit = "" if s.distillation_clip is None else f", at most {s.distillation_clip:g}"
        if s.distillation_steps is not None:
            weight += f", over {s.distillation_steps:g} steps to {s.distillation_end or 0:g},"
        where = "ln(teacher / pi) in A" if s.distillation == "sampled" else "over the teacher's top K and the rest"
        yield f"  distillation: + {weight} {s.distillation}, {where}{limit}; A times {s.advantage_weight:g}"
    if s.entropy_coefficient:
        yield f"  entropy: - {s.entropy_coefficient:g} entropy(pi)"


def axes(s: ObjectiveSettings) -> dict[str, str]:
    """Return the main axes as table cells, with "-" where an axis has no meaning. The keys never change."""
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


def additions(s: ObjectiveSettings) -> list[str]:
    """Return short phrases for the parts of a method that the axes table omits."""
    low, high = negative_bounds(s)
    by_sign = s.ratio_floor_negative is not None or s.ratio_cap_negative is not None
    which = {"any": "", "harmful": ", harmful tokens", "negative": ", A < 0"}[s.response_sign]
    region = f"{s.response_region} {s.response_divergence} > {_bound(s.response_delta, '-')}{which}"
    parts = {
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
        f"{s.distillation.replace('_', ' ')} from a teacher, {s.distillation_coefficient:g}": s.distillation != "none",
        f"A times {s.advantage_weight:g}": s.advantage_weight != 1,
    }
    return [words for words, holds in parts.items() if holds]


def _in_short(s: ObjectiveSettings) -> str:
    base = {"rollout": "the engine's", "old": "the old policy's"}[s.anchor]
    if s.control in ("none", "gate"):
        return "no trust region" if s.control == "none" else f"a smooth weight by the ratio to {base} probability"
    if s.control == "quadratic":
        return f"a quadratic penalty on the shift from {base} probability"
    ends = {"below": 1 - (s.epsilon_low or 0), "above": 1 + (s.epsilon_high or 0)}
    shift = _SHIFTS[s.divergence].format(s=s, base=base, **ends)
    where = {"predictive": ", where the update raises it", "negative": ", where A < 0"}.get(s.direction, "")
    return f"{'masks' if s.control == 'mask' else 'penalises'} tokens whose {shift}{where}"


def _ratio(s: ObjectiveSettings) -> str:
    if s.importance == "none":
        return "r = 1, no importance ratio"
    text = f"r = pi(a) / base(a), base = {_POLICIES[s.importance]}{_LEVELS[s.ratio_level]}"
    bounds = []
    if s.ratio_floor is not None:
        bounds.append(f"at least {s.ratio_floor:g}")
    if s.ratio_cap is not None:
        bounds.append(f"at most {s.ratio_cap:g}")
    if s.ratio_floor_negative is not None or s.ratio_cap_negative is not None:
        low, high = negative_bounds(s)
        bounds.append(f"where A < 0 [{_bound(low, '0')}, {_bound(high, 'inf')}]")
    if s.batch_statistic == "effective_size":
        bounds.append("at most the batch's effective share of samples")
    if not bounds:
        return text + ", not capped"
    effect = "loses its gradient" if s.path == "ratio" else "keeps its gradient"
    return text + f", truncated to {' and '.join(bounds)} (a truncated token {effect})"


def _region(s: ObjectiveSettings) -> Iterator[str]:
    if s.control == "none":
        yield "  trust region: none"
        return
    if s.control == "gate":
        yield "  trust region: none, a smooth weight instead"
        bounds = {} if s.epsilon_low is None else {"below": 1 - s.epsilon_low, "above": 1 + s.epsilon_high}
        yield f"  control: {_GATES[s.gate].format(s=s, **bounds)}"
        return
    yield f"  trust region: {_DIVERGENCES[s.divergence]}; anchor: {_POLICIES[s.anchor]}"
    yield from _positions(s)
    delta = s.penalty_delta or s.delta
    if s.measures_ratio:
        threshold = f"r outside [{1 - s.epsilon_low:g}, {1 + s.epsilon_high:g}]"
        scale = f"/ (2 epsilon), epsilon = {s.epsilon_low:g} below and {s.epsilon_high:g} above"
    else:
        threshold = f"D > delta = {s.delta:g}" + ("" if s.delta_low is None else f" ({s.delta_low:g} where r < 1)")
        scale = f"/ (2 delta), delta = {delta:g}"
    outside = f"{threshold} {_DIRECTIONS[s.direction].format(s=s)}"
    if s.control == "mask":
        yield f"  control: a token loses its gradient when {outside}"
        if s.dual_clip is not None:
            yield f"  dual clip: and when A < 0 and r > {s.dual_clip:g}"
        return
    penalised = _PENALISED[s.divergence]
    where = "on every token" if s.control == "quadratic" else f"where {outside}"
    if s.penalty == "l2" and s.penalty_weight == "advantage":
        yield f"  control: quadratic penalty on the shift of {penalised}, times |A| {scale}, {where}"
    else:
        by = "|A| / delta" if s.penalty_weight == "advantage" else "1 / delta"
        yield f"  control: penalty on {penalised} by {s.penalty}, times {by}, delta = {delta:g}, {where}"
    if s.divergence == "binary_tv" and delta >= 1:
        yield "  note: with delta >= 1 the gradient weight never reaches zero: damping, not a trust region"


def _positions(s: ObjectiveSettings) -> Iterator[str]:
    if s.position_weight is not None:
        yield f"  position: D has weight 1 at the start of a response and {s.position_weight:g} at its end"
    if s.prefix_budget is not None:
        max_budget = (s.prefix_budget_ceiling or 2) * s.prefix_budget
        budget = f"{s.prefix_budget:g}, or up to {max_budget:g} by the response's own D"
        yield f"  prefix: the threshold shrinks where the mean D before the token is above {budget}"
    if s.free_low is not None or s.free_high is not None:
        yield f"  free: tokens with r in [{1 - (s.free_low or 0):g}, {1 + (s.free_high or 0):g}]"
    if s.exempt_below is not None:
        side = {"both": "", "low": " and r < 1", "high": " and r > 1"}[s.exempt_side]
        yield f"  exempt: tokens with mu < {s.exempt_below:g}{side}"


def _corrections(s: ObjectiveSettings) -> Iterator[str]:
    if s.response_region != "none":
        reduction = {"mean": "mean", "max": "largest"}[s.response_region]
        when = f"its {reduction} {s.response_divergence} is above {s.response_delta:g}"
        yield f"  responses: {_RESPONSES[s.response_sign]} when {when}"
    if s.centering != "none":
        yield "  centering: minus A times the score that mu expects, over the engine's list and a modelled tail"
    if s.batch_statistic == "second_moment":
        yield _BATCH.format(square="its square", budget=s.second_moment_budget, kept="")
    elif s.batch_statistic == "second_moment_clip":
        square = "the square, including those clipped at the bound,"
        exemption = "; tokens with old / mu within [0.7, 1.5] are kept"
        yield _BATCH.format(square=square, budget=s.second_moment_budget, kept=exemption)
    low, high = _bound(s.mismatch_low, "0"), _bound(s.mismatch_high, "inf")
    if s.mismatch == "truncate":
        yield f"  mismatch: weighted by min(trainer / engine, {high}), {s.mismatch_level} level (TIS)"
    elif s.mismatch == "mask":
        level = f"{s.mismatch_level} level (IcePop)"
        yield f"  mismatch: a token is dropped where trainer / engine leaves [{low}, {high}], {level}"
    if s.rejection != "none":
        low, high = _bound(s.rejection_low, "0"), _bound(s.rejection_high, "inf")
        reductions = {"geometric": "geometric mean", "sequence": "product", "any_token": "of any of its tokens"}
        reduction = reductions[s.rejection]
        yield f"  rejection: a response is dropped when trainer / engine ({reduction}) leaves [{low}, {high}]"
    if s.drops_outliers:
        low, high = _bound(s.outlier_low, "0"), _bound(s.outlier_high, "inf")
        yield f"  outliers: a response is dropped when trainer / engine of any token leaves [{low}, {high}]"


def _bound(value: float | None, absent: str) -> str:
    return absent if value is None else f"{value:g}"
