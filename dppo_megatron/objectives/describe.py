"""A method in words."""

from __future__ import annotations

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
            *_corrections(s),
        ]
    if s.reference_kl != "none":
        lines.append(
            f"  reference: + {s.reference_kl_coefficient:g} KL(pi || reference), estimator {s.reference_kl}, "
            f"{s.reference_kl_gradient} gradient"
        )
    if s.entropy_coefficient:
        lines.append(f"  entropy: - {s.entropy_coefficient:g} entropy(pi)")
    return "\n".join(lines)


def axes(s: ObjectiveSettings) -> dict[str, str]:
    """The main axes as the cells of a table, "-" where one has no meaning. The same keys for every method."""
    region = s.control != "none"
    policies = {"rollout": "mu", "old": "old"}
    if not region:
        threshold = "-"
    elif s.measures_ratio:
        threshold = f"-{s.epsilon_low:g} +{s.epsilon_high:g}" + (f", dual {s.dual_clip:g}" if s.dual_clip else "")
    else:
        threshold = f"{s.delta:g}" + (f", penalty {s.penalty_delta:g}" if s.penalty_delta else "")
    ratio = "1" if s.importance == "none" else f"pi/{policies[s.importance]}"
    if s.ratio_level == "sequence":
        ratio += ", sequence"
    if s.ratio_floor is not None or s.ratio_cap is not None:
        ratio += f" in [{_bound(s.ratio_floor, '0')}, {_bound(s.ratio_cap, 'inf')}]"
    return {
        "divergence": s.divergence if region else "-",
        "control": s.control,
        "direction": s.direction if s.control in ("mask", "mask_quadratic") else "-",
        "anchor": policies[s.anchor] if region else "-",
        "threshold": threshold,
        "ratio": ratio,
    }


def _ratio(s: ObjectiveSettings) -> str:
    if s.importance == "none":
        return "r = 1, no importance ratio"
    text = f"r = pi(a) / base(a), base = {_POLICIES[s.importance]}"
    if s.ratio_level == "sequence":
        text += ", geometric mean over the response"
    bounds = [
        f"at least {s.ratio_floor:g}" if s.ratio_floor is not None else "",
        f"at most {s.ratio_cap:g}" if s.ratio_cap is not None else "",
    ]
    if any(bounds):
        kept = "keeps its gradient" if s.path == "logprob" else "loses its gradient"
        return text + f", truncated to {' and '.join(b for b in bounds if b)} (a truncated token {kept})"
    return text + ", not capped"


def _region(s: ObjectiveSettings) -> list[str]:
    if s.control == "none":
        return ["  trust region: none"]
    lines = [f"  trust region: {_DIVERGENCES[s.divergence]}; anchor: {_POLICIES[s.anchor]}"]
    if s.measures_ratio:
        threshold = f"r outside [{1 - s.epsilon_low:g}, {1 + s.epsilon_high:g}]"
    else:
        threshold = f"D > delta = {s.delta:g}"
    tail = f", tail {s.tail}"
    side = {
        "sampled": "and it is moving away (A > 0 and r > 1, or A < 0 and r < 1)",
        "predictive": f"and the update would raise D (A times the predicted change > 0{tail})",
        "symmetric": "whatever the sign of A",
    }[s.direction]
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
    lines.append(f"  control: quadratic penalty on the shift of {what}, times |A| {scale}, {where}")
    if s.divergence == "binary_tv" and (s.penalty_delta or s.delta) >= 1:
        lines.append("  note: with delta >= 1 the gradient weight never reaches zero: damping, not a trust region")
    return lines


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
    return lines


def _bound(value: float | None, absent: str) -> str:
    return absent if value is None else f"{value:g}"
