"""The axes of a method: one frozen dataclass, its types, and which combinations make sense."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dppo_megatron.errors import ExpectedError

from .rules import CONDITIONAL, combination_problems

_SMALLEST, _LARGEST = 1e-30, 1e30  # what fp32 holds with room for a quotient or a product


class ObjectiveError(ExpectedError, ValueError):
    """A method that does not exist or does not make sense, or inputs it cannot work with."""


AdvantageKind = Literal["group_mean", "group_mean_std", "leave_one_out", "batch_normalised", "batch_mean"]
AggregationKind = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum"]
CreditKind = Literal["trajectory", "turn"]
ADVANTAGE_KINDS: tuple[AdvantageKind, ...] = get_args(AdvantageKind)
AGGREGATION_KINDS: tuple[AggregationKind, ...] = get_args(AggregationKind)


def _choice(default: str, *others: str, doc: str, aliases: Mapping[str, str] | None = None) -> Any:
    meta = {"choices": (default, *others), "aliases": aliases or {}, "doc": doc}
    return dataclasses.field(default=default, metadata=meta)


def _number(
    default: float | None = None, *, above: float | None = None, at_least: float | None = None, doc: str
) -> Any:
    meta = {"optional": default is None, "above": above, "at_least": at_least, "doc": doc}
    return dataclasses.field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """The axes of a method. mu = rollout policy, pi = policy in training, a = sampled token, A = advantage.

    Validated on construction: raises ObjectiveError that names every axis at fault at once.
    """

    # The trust region: what is measured, what happens outside, which side is harmful, against which policy.
    divergence: str = _choice(
        "binary_tv",
        "binary_kl",
        "topk_tv",
        "topk_kl",
        "ratio",
        doc="what measures the distance of pi from its anchor; 'ratio' is PPO's |r - 1|",
    )
    control: str = _choice(
        "mask",
        "quadratic",
        "mask_quadratic",
        "gate",
        "none",
        doc="drop the gradient outside the region; a penalty everywhere, or only outside; a smooth weight; nothing",
    )
    direction: str = _choice(
        "sampled",
        "predictive",
        "symmetric",
        "negative",
        doc="which tokens count as diverging: by A and r - 1; by A and the predicted change of D; all; "
        "as the first, but only where A < 0",
    )
    tail: str = _choice(
        "aggregated",
        "uniform",
        doc="predictive direction: the mass outside the top K as one token, or spread evenly over the tail",
    )
    anchor: str = _choice(
        "rollout",
        "old",
        doc="centre of the trust region: the engine's mu, or the old policy, which the trainer recomputes",
        aliases={"recomputed": "old"},
    )
    delta: float | None = _number(above=0.0, doc="threshold of a TV or KL divergence (a probability shift or nats)")
    delta_low: float | None = _number(above=0.0, doc="threshold where r < 1, the token became rarer; None = delta")
    position_weight: float | None = _number(
        above=0.0, doc="D counts in full at the first token of a response and times this at its last; None = 1 (CPPO)"
    )
    prefix_budget: float | None = _number(
        at_least=0.0,
        doc="the threshold shrinks where D of the tokens before averages more than this; None = off (CPPO)",
    )
    prefix_budget_ceiling: float | None = _number(
        at_least=1.0, doc="times prefix_budget: the most that it rises to with a response's own D; None = 2 (CPPO)"
    )
    exempt_below: float | None = _number(above=0.0, doc="tokens with mu below this have no region; None = none have")
    exempt_side: str = _choice("both", "low", "high", doc="exempt_below: of r on both sides, of r < 1, of r > 1 only")
    free_low: float | None = _number(
        above=0.0, doc="divergence other than 'ratio': r from 1 - free_low on is never outside"
    )
    free_high: float | None = _number(above=0.0, doc="the same up to 1 + free_high (the default of BandPO's code)")
    penalty_delta: float | None = _number(
        above=0.0,
        doc="control 'mask_quadratic' on a TV divergence: scale of its penalty; None = delta",
    )
    epsilon_low: float | None = _number(above=0.0, doc="divergence 'ratio': the region reaches down to 1 - epsilon_low")
    epsilon_high: float | None = _number(above=0.0, doc="divergence 'ratio': the region reaches up to 1 + epsilon_high")
    dual_clip: float | None = _number(
        above=1.0, doc="PPO: no gradient where A < 0 and r > dual_clip; gate 'inverse': its largest weight; None = off"
    )
    penalty: str = _choice(
        "l2", "tv", "kl", "k3", doc="quadratic controls: what they penalise (the DRPO paper's ablation)"
    )
    penalty_weight: str = _choice("advantage", "one", doc="quadratic controls: the penalty times |A|, or as it is")
    gate: str = _choice(
        "sigmoid",
        "gaussian",
        "inverse",
        "gamma",
        doc="control 'gate': the smooth weight of SAPO, MASPO, ASPO or VESPO",
    )
    gate_positive: float | None = _number(above=0.0, doc="where A > 0: sigmoid tau, gaussian beta, gamma lambda")
    gate_negative: float | None = _number(above=0.0, doc="the same where A < 0")
    gate_power_positive: float | None = _number(above=0.0, doc="gate 'gamma', where A > 0: its power k")
    gate_power_negative: float | None = _number(above=0.0, doc="the same where A < 0")
    gate_width: float | None = _number(above=0.0, doc="gate 'gaussian': its width for a token of probability 1")
    gate_width_max: float | None = _number(above=0.0, doc="gate 'gaussian': the most that a rare token widens it to")
    gate_mass_power: float | None = _number(above=0.0, doc="gate 'gaussian': its width grows as mu to the minus this")

    # A second region, of whole responses, beside any control.
    response_region: str = _choice(
        "none",
        "mean",
        "max",
        doc="drop tokens of responses whose D, by mean or largest over their tokens, is too large",
    )
    response_divergence: str = _choice(
        "k1",
        "k2",
        "k3",
        "ratio",
        "binary_tv",
        "binary_kl",
        "topk_tv",
        "topk_kl",
        doc="response region: D of a token from mu; k1, k2, k3 = -ln r, (ln r)^2 / 2, r - 1 - ln r",
    )
    response_delta: float | None = _number(above=0.0, doc="response region: its threshold")
    response_sign: str = _choice(
        "any",
        "harmful",
        "negative",
        doc="response region: drop all its tokens, those that diverge further, those of A < 0",
    )

    # The importance ratio that multiplies the advantage.
    importance: str = _choice(
        "rollout",
        "old",
        "none",
        doc="r = pi / mu, pi / old policy, or 1",
        aliases={"recomputed": "old"},
    )
    ratio_level: str = _choice(
        "token",
        "sequence",
        "product",
        "prefix_minimum",
        doc="r of the token; of the response, as geometric mean (GSPO) or product; r times the least r before (MinPRO)",
    )
    ratio_cap: float | None = _number(above=0.0, doc="r is truncated to at most this; None = no cap")
    ratio_floor: float | None = _number(at_least=0.0, doc="r is raised to at least this; None = no floor")
    ratio_cap_negative: float | None = _number(above=0.0, doc="the cap where A < 0; None = ratio_cap")
    ratio_floor_negative: float | None = _number(at_least=0.0, doc="the floor where A < 0; None = ratio_floor")
    gradient_path: str = _choice(
        "auto",
        "ratio",
        "logprob",
        "through",
        doc="through r (a capped r has no gradient) or sg(r) ln pi (it has); auto = logprob iff capped; "
        "'through': the value of the first, the gradient of the second",
    )
    centering: str = _choice(
        "none", "policy", doc="subtract the weighted score that mu expects, over the engine's list (score centering)"
    )
    batch_statistic: str = _choice(
        "none",
        "second_moment",
        "second_moment_clip",
        "effective_size",
        doc="of the whole batch, old / mu: drop the largest |ln r| (M2PO), as the paper's algorithm or as its released "
        "code; cap r and weigh the KL to mu (P3O)",
    )
    second_moment_budget: float | None = _number(
        above=0.0, doc="M2PO: what the mean of (ln r)^2 must stay below, over the tokens that move away (A ln r > 0)"
    )
    supervised: bool = dataclasses.field(
        default=False,
        metadata={"flag": True, "doc": "plain negative log-likelihood: A = 1, no rollout policy"},
    )

    # Corrections of the mismatch between the engine and the trainer, off by default.
    mismatch: str = _choice(
        "none",
        "truncate",
        "mask",
        doc="trainer / engine truncated at mismatch_high (TIS), or tokens outside its bounds dropped",
    )
    mismatch_level: str = _choice("token", "sequence", "geometric", doc="of the token, product or geometric mean")
    mismatch_low: float | None = _number(at_least=0.0, doc="lower bound of mismatch 'mask'; None = none")
    mismatch_high: float | None = _number(above=0.0, doc="upper bound of the mismatch ratio")
    rejection: str = _choice(
        "none",
        "geometric",
        "sequence",
        "any_token",
        doc="drop a response when this mismatch ratio (any_token: of any token) leaves the bounds",
    )
    rejection_low: float | None = _number(at_least=0.0, doc="lower bound of rejection; None = none")
    rejection_high: float | None = _number(above=0.0, doc="upper bound of rejection; None = none")
    outlier_low: float | None = _number(
        at_least=0.0, doc="beside rejection: drop a response with any token's mismatch ratio below this; None = none"
    )
    outlier_high: float | None = _number(above=0.0, doc="the same above this; None = none")

    # Optional terms, off by default.
    reference_kl: str = _choice("none", "k1", "k2", "k3", doc="estimator of KL(pi || reference)")
    reference_kl_coefficient: float = _number(0.0, at_least=0.0, doc="weight of the KL to the reference policy")
    reference_kl_gradient: str = _choice(
        "unbiased",
        "estimator",
        doc="the gradient of the KL itself, or of the estimator as written",
    )
    rollout_kl: str = _choice(
        "none", "squared", "k3", doc="KL to the rollout policy: (ln r)^2, or ln r + 1/r - 1, on every token"
    )
    rollout_kl_coefficient: float = _number(0.0, at_least=0.0, doc="weight of the KL to the rollout policy")
    entropy_coefficient: float = _number(0.0, at_least=0.0, doc="weight of the entropy bonus")

    def __post_init__(self) -> None:
        for name in AXES:
            object.__setattr__(self, name, canonical(name, getattr(self, name)))
        wrong = {name: axis_problem(name, getattr(self, name)) for name in AXES}
        problems = [f"{name}={getattr(self, name)!r} {why}" for name, why in wrong.items() if why]
        if not problems:
            problems = combination_problems(self, {name: field.default for name, field in AXES.items()})
        if problems:
            raise ObjectiveError("; ".join(problems))

    @property
    def path(self) -> str:
        """The gradient path with 'auto' resolved: 'ratio' or 'logprob'."""
        if self.gradient_path != "auto":
            return self.gradient_path
        return "logprob" if self.truncates or self.importance == "none" else "ratio"

    @property
    def truncates(self) -> bool:
        bounds = (self.ratio_cap, self.ratio_floor, self.ratio_cap_negative, self.ratio_floor_negative)
        return any(bound is not None for bound in bounds) or self.batch_statistic == "effective_size"

    @property
    def drops_outliers(self) -> bool:
        return self.outlier_low is not None or self.outlier_high is not None

    @property
    def has_region(self) -> bool:
        """True where the control needs an anchor and a threshold."""
        return self.control not in ("none", "gate")

    @property
    def measures_ratio(self) -> bool:
        return self.divergence == "ratio"

    @property
    def reads_topk(self) -> bool:
        """True when the method reads the rollout policy's top K."""
        region = self.divergence in ("topk_tv", "topk_kl") or self.direction == "predictive"
        responses = self.response_region != "none" and self.response_divergence in ("topk_tv", "topk_kl")
        return region or responses or self.centering != "none"


AXES = {field.name: field for field in dataclasses.fields(ObjectiveSettings)}

# Names accepted beside the axes, and the axes that each sets.
AXIS_ALIASES = {"epsilon": ("epsilon_low", "epsilon_high")}


def override(base: ObjectiveSettings, overrides: dict[str, Any]) -> ObjectiveSettings:
    """`base` with some axes replaced; a name of AXIS_ALIASES sets all of its axes.

    Raises ObjectiveError for an unknown axis (with the nearest name), an ill-typed value, or a combination
    that makes no sense.
    """
    given = dict(overrides)
    for alias, axes in AXIS_ALIASES.items():
        if alias in given:
            given = dict.fromkeys(axes, given.pop(alias)) | given
    if unknown := [_unknown_axis(name) for name in given if name not in AXES]:
        raise ObjectiveError("; ".join(unknown))
    merged = {**{name: getattr(base, name) for name in AXES}, **given}
    draft = object.__new__(ObjectiveSettings)
    for name, value in merged.items():
        object.__setattr__(draft, name, value)
    for name, applies, _ in CONDITIONAL:
        if name not in given and not applies(draft):
            merged[name] = AXES[name].default
    return ObjectiveSettings(**merged)


def nearest(name: str, known: Any) -> str:
    """The known names that have all words of this one, or are close to it, as a question; all of them when none is."""
    close = [other for other in known if set(str(name).split("_")) <= set(other.split("_"))]
    known = sorted(known)
    close = close or difflib.get_close_matches(str(name), known, n=3, cutoff=0.65)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "known: " + ", ".join(known)


def axis_problem(name: str, value: Any) -> str:
    """Why this axis, or one that the alias sets, cannot have `value`, or why there is none such; "" when it is fine."""
    if name in AXIS_ALIASES:
        return next(filter(None, (axis_problem(axis, value) for axis in AXIS_ALIASES[name])), "")
    if name not in AXES:
        return _unknown_axis(name)
    value, meta = canonical(name, value), AXES[name].metadata
    if "choices" in meta:
        return "" if value in meta["choices"] else _choice_problem(value, meta)
    if "flag" in meta:
        return "" if isinstance(value, bool) else "must be true or false"
    return _number_problem(value, meta)


def canonical(name: str, value: Any) -> Any:
    """The axis's own name of a value that it also accepts under another, e.g. old for recomputed."""
    aliases = AXES[name].metadata.get("aliases", {}) if name in AXES else {}
    return aliases.get(value, value) if isinstance(value, str) else value


def _unknown_axis(name: str) -> str:
    close = nearest(name, [*AXES, *AXIS_ALIASES])
    return f"unknown axis {name!r}: {close if close.endswith('?') else '`dppo-megatron objectives NAME` lists them'}"


def _choice_problem(value: Any, meta: Any) -> str:
    accepted = [*meta["choices"], *(f"{alias} (= {own})" for alias, own in meta["aliases"].items())]
    hint = nearest(value, [*meta["choices"], *meta["aliases"]]) if isinstance(value, str) else ""
    return f"is not one of {', '.join(accepted)}. {hint}".rstrip(". ")


def _number_problem(value: Any, meta: Any) -> str:
    or_none = " or None" if meta["optional"] else ""
    if value is None:
        return "" if meta["optional"] else "must be a number, not None"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"must be a finite number{or_none}"
    if value != 0 and not _SMALLEST <= abs(value) <= _LARGEST:
        return f"must be a finite number{or_none}, of {_SMALLEST:g} to {_LARGEST:g}: the loss is computed in fp32"
    if meta["above"] is not None and not value > meta["above"]:
        return f"must be above {meta['above']:g}"
    if meta["at_least"] is not None and not value >= meta["at_least"]:
        return f"must be at least {meta['at_least']:g}"
    return ""
