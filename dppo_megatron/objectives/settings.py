"""Define the axes of a method: one frozen dataclass, its types, and the branch of each axis."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from dppo_megatron.errors import ExpectedError

from .rules import BRANCHES, combination_problems

_SMALLEST, _LARGEST = 1e-30, 1e30  # range of fp32, with room for a quotient or a product


class ObjectiveError(ExpectedError, ValueError):
    """The method is unknown, its combination has no meaning, or it cannot use the inputs."""


AdvantageKind = Literal["group_mean", "group_mean_std", "leave_one_out", "batch_normalised", "batch_mean"]
AggregationKind = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum"]
CreditKind = Literal["trajectory", "turn"]
ADVANTAGE_KINDS: tuple[AdvantageKind, ...] = get_args(AdvantageKind)
AGGREGATION_KINDS: tuple[AggregationKind, ...] = get_args(AggregationKind)


@dataclass(frozen=True)
class _Above:
    """Requires a number above `least`, or equal to it if `included`."""

    least: float
    included: bool = False


Positive = Annotated[float | None, _Above(0)]
NotNegative = Annotated[float | None, _Above(0, included=True)]
AboveOne = Annotated[float | None, _Above(1)]
AtLeastOne = Annotated[float | None, _Above(1, included=True)]
Weight = Annotated[float, _Above(0, included=True)]
TokenDivergence = Literal["k1", "k2", "k3", "ratio", "binary_tv", "binary_kl", "topk_tv", "topk_kl"]


def _axis(
    doc: str,
    default: Any = None,
    *,
    of: str | None = None,
    needed_by: str | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Any:
    """Declare an axis. of, needed_by: the branch of `rules.BRANCHES` that uses or requires it."""
    meta = {"doc": doc, "of": of or needed_by, "required": needed_by is not None, "aliases": aliases or {}}
    return dataclasses.field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Contains the axes of a method. mu = rollout policy, pi = policy in training, a = sampled token, A = advantage.

    Validated on construction: raises ObjectiveError that names every wrong axis at once.
    """

    # The trust region: the divergence, the control outside, the harmful side, and the anchor.
    divergence: Literal["binary_tv", "binary_kl", "topk_tv", "topk_kl", "ratio"] = _axis(
        "what measures the distance of pi from its anchor; 'ratio' is PPO's |r - 1|", "binary_tv"
    )
    control: Literal["mask", "quadratic", "mask_quadratic", "gate", "none"] = _axis(
        "drop the gradient outside the region; a penalty everywhere, or only outside; a smooth weight; nothing", "mask"
    )
    direction: Literal["sampled", "predictive", "symmetric", "negative"] = _axis(
        "which tokens count as diverging: by A and r - 1; by A and the predicted change of D; all; as the first, "
        "but only where A < 0",
        "sampled",
        of="mask",
    )
    tail: Literal["aggregated", "uniform"] = _axis(
        "predictive direction: the mass outside the top K as one token, or spread evenly over the tail",
        "aggregated",
        of="predictive",
    )
    anchor: Literal["rollout", "old"] = _axis(
        "centre of the trust region: the engine's mu, or the old policy, which the trainer recomputes",
        "rollout",
        of="region",
        aliases={"recomputed": "old"},
    )
    delta: Positive = _axis("threshold of a TV or KL divergence (a probability shift or nats)", needed_by="mass region")
    delta_low: Positive = _axis("threshold where r < 1, the token became rarer; None = delta", of="mass mask")
    position_weight: Positive = _axis(
        "D counts in full at the first token of a response and times this at its last; None = 1 (CPPO)", of="mass mask"
    )
    prefix_budget: NotNegative = _axis(
        "the threshold shrinks where D of the tokens before averages more than this; None = off (CPPO)", of="mass mask"
    )
    prefix_budget_ceiling: AtLeastOne = _axis(
        "times prefix_budget: the most that it rises to with a response's own D; None = 2 (CPPO)", of="prefix budget"
    )
    exempt_below: Positive = _axis("tokens with mu below this have no region; None = none have", of="mask")
    exempt_side: Literal["both", "low", "high"] = _axis(
        "exempt_below: of r on both sides, of r < 1, of r > 1 only", "both", of="exemption"
    )
    free_low: Positive = _axis("divergence other than 'ratio': r from 1 - free_low on is never outside", of="mass mask")
    free_high: Positive = _axis("the same up to 1 + free_high (the default of BandPO's code)", of="mass mask")
    penalty_delta: Positive = _axis(
        "control 'mask_quadratic' on a TV divergence: scale of its penalty; None = delta", of="second scale"
    )
    epsilon_low: Positive = _axis(
        "divergence 'ratio': the region reaches down to 1 - epsilon_low", needed_by="ratio bounds"
    )
    epsilon_high: Positive = _axis(
        "divergence 'ratio': the region reaches up to 1 + epsilon_high", needed_by="ratio bounds"
    )
    dual_clip: AboveOne = _axis(
        "PPO: no gradient where A < 0 and r > dual_clip; gate 'inverse': its largest weight; None = off", of="dual clip"
    )
    penalty: Literal["l2", "tv", "kl", "k3"] = _axis(
        "quadratic controls: what they penalise (the DRPO paper's ablation)", "l2", of="sampled penalty"
    )
    penalty_weight: Literal["advantage", "one"] = _axis(
        "quadratic controls: the penalty times |A|, or as it is", "advantage", of="sampled penalty"
    )
    gate: Literal["sigmoid", "gaussian", "inverse", "gamma"] = _axis(
        "control 'gate': the smooth weight of SAPO, MASPO, ASPO or VESPO", "sigmoid", of="gate"
    )
    gate_positive: Positive = _axis("where A > 0: sigmoid tau, gaussian beta, gamma lambda", needed_by="signed gate")
    gate_negative: Positive = _axis("the same where A < 0", needed_by="signed gate")
    gate_power_positive: Positive = _axis("gate 'gamma', where A > 0: its power k", needed_by="gamma gate")
    gate_power_negative: Positive = _axis("the same where A < 0", needed_by="gamma gate")
    gate_width: Positive = _axis("gate 'gaussian': its width for a token of probability 1", needed_by="gaussian gate")
    gate_width_max: Positive = _axis(
        "gate 'gaussian': the most that a rare token widens it to", needed_by="gaussian gate"
    )
    gate_mass_power: Positive = _axis(
        "gate 'gaussian': its width grows as mu to the minus this", needed_by="gaussian gate"
    )

    # A second region, for whole responses, with any control.
    response_region: Literal["none", "mean", "max"] = _axis(
        "drop tokens of responses whose D, by mean or largest over their tokens, is too large", "none"
    )
    response_divergence: TokenDivergence = _axis(
        "response region: D of a token from mu; k1, k2, k3 = -ln r, (ln r)^2 / 2, r - 1 - ln r",
        "k1",
        of="response region",
    )
    response_delta: Positive = _axis("response region: its threshold", needed_by="response region")
    response_sign: Literal["any", "harmful", "negative"] = _axis(
        "response region: drop all its tokens, those that diverge further, those of A < 0", "any", of="response region"
    )

    # The importance ratio that multiplies the advantage.
    importance: Literal["rollout", "old", "none"] = _axis(
        "r = pi / mu, pi / old policy, or 1", "rollout", aliases={"recomputed": "old"}
    )
    ratio_level: Literal["token", "sequence", "product", "prefix_minimum"] = _axis(
        "r of the token; of the response, as geometric mean (GSPO) or product; r times the least r before (MinPRO)",
        "token",
        of="ratio",
    )
    ratio_cap: Positive = _axis("r is truncated to at most this; None = no cap", of="ratio")
    ratio_floor: NotNegative = _axis("r is raised to at least this; None = no floor", of="ratio")
    ratio_cap_negative: Positive = _axis("the cap where A < 0; None = ratio_cap", of="ratio")
    ratio_floor_negative: NotNegative = _axis("the floor where A < 0; None = ratio_floor", of="ratio")
    gradient_path: Literal["auto", "ratio", "logprob", "through"] = _axis(
        "through r (a capped r has no gradient) or sg(r) ln pi (it has); auto = logprob iff capped; 'through': the"
        " value of the first, the gradient of the second",
        "auto",
        of="ratio",
    )
    centering: Literal["none", "policy"] = _axis(
        "subtract the weighted score that mu expects, over the engine's list (score centering)", "none"
    )
    batch_statistic: Literal["none", "second_moment", "second_moment_clip", "effective_size"] = _axis(
        "of the whole batch, old / mu: drop the largest |ln r| (M2PO), as the paper's algorithm or as its released"
        " code; cap r and weigh the KL to mu (P3O)",
        "none",
    )
    second_moment_budget: Positive = _axis(
        "M2PO: what the mean of (ln r)^2 must stay below, over the tokens that move away (A ln r > 0)",
        needed_by="second moment",
    )
    supervised: bool = _axis("plain negative log-likelihood: A = 1, no rollout policy", False)

    # Corrections of the mismatch between the engine and the trainer, off by default.
    mismatch: Literal["none", "truncate", "mask"] = _axis(
        "trainer / engine truncated at mismatch_high (TIS), or tokens outside its bounds dropped", "none", of="ratio"
    )
    mismatch_level: Literal["token", "sequence", "geometric"] = _axis(
        "of the token, product or geometric mean", "token", of="mismatch"
    )
    mismatch_low: NotNegative = _axis("lower bound of mismatch 'mask'; None = none", of="mismatch mask")
    mismatch_high: Positive = _axis("upper bound of the mismatch ratio", needed_by="mismatch")
    rejection: Literal["none", "geometric", "sequence", "any_token"] = _axis(
        "drop a response when this mismatch ratio (any_token: of any token) leaves the bounds", "none"
    )
    rejection_low: NotNegative = _axis("lower bound of rejection; None = none", of="rejection")
    rejection_high: Positive = _axis("upper bound of rejection; None = none", of="rejection")
    outlier_low: NotNegative = _axis(
        "with another rejection: drop a response with any token's mismatch ratio below this; None = none"
    )
    outlier_high: Positive = _axis("the same above this; None = none")

    # Optional terms, off by default.
    reference_kl: Literal["none", "k1", "k2", "k3"] = _axis("estimator of KL(pi || reference)", "none")
    reference_kl_coefficient: Weight = _axis("weight of the KL to the reference policy", 0.0, needed_by="reference")
    reference_kl_gradient: Literal["unbiased", "estimator"] = _axis(
        "the gradient of the KL itself, or of the estimator as written", "unbiased", of="reference"
    )
    rollout_kl: Literal["none", "squared", "k3"] = _axis(
        "KL to the rollout policy: (ln r)^2, or ln r + 1/r - 1, on every token", "none"
    )
    rollout_kl_coefficient: Weight = _axis("weight of the KL to the rollout policy", 0.0, needed_by="rollout")
    entropy_coefficient: Weight = _axis("weight of the entropy bonus", 0.0)

    def __post_init__(self) -> None:
        for name in AXES:
            object.__setattr__(self, name, canonical(name, getattr(self, name)))
        wrong = {name: axis_problem(name, getattr(self, name)) for name in AXES}
        problems = [f"{name}={getattr(self, name)!r} {why}" for name, why in wrong.items() if why]
        if not problems:
            problems = combination_problems(self, AXES)
        if problems:
            raise ObjectiveError("; ".join(problems))

    @property
    def path(self) -> str:
        """Return the gradient path with 'auto' resolved to 'ratio' or 'logprob'."""
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
        """Return whether the control needs an anchor and a threshold."""
        return self.control not in ("none", "gate")

    @property
    def masks(self) -> bool:
        return self.control in ("mask", "mask_quadratic")

    @property
    def measures_ratio(self) -> bool:
        return self.divergence == "ratio"

    @property
    def reads_topk(self) -> bool:
        """Return whether the method uses the rollout policy's top K."""
        region = self.divergence in ("topk_tv", "topk_kl") or self.direction == "predictive"
        responses = self.response_region != "none" and self.response_divergence in ("topk_tv", "topk_kl")
        return region or responses or self.centering != "none"


AXES = {field.name: field for field in dataclasses.fields(ObjectiveSettings)}
_HINTS = get_type_hints(ObjectiveSettings, include_extras=True)

# Names accepted in addition to the axes, and the axes that each sets.
AXIS_ALIASES = {"epsilon": ("epsilon_low", "epsilon_high")}


def override(base: ObjectiveSettings, overrides: dict[str, Any]) -> ObjectiveSettings:
    """Return `base` with some axes replaced; a name of AXIS_ALIASES sets all its axes.

    Raises ObjectiveError for an unknown axis (with the nearest name), an ill-typed value, or a meaningless combination.
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
    for name, field in AXES.items():
        branch = field.metadata["of"]
        if branch is not None and name not in given and not BRANCHES[branch][0](draft):
            merged[name] = field.default
    return ObjectiveSettings(**merged)


def nearest(name: str, known: Any) -> str:
    """Return the known names that contain all words of this one, or close ones, as a question; else all names."""
    close = [other for other in known if set(str(name).split("_")) <= set(other.split("_"))]
    known = sorted(known)
    close = close or difflib.get_close_matches(str(name), known, n=3, cutoff=0.65)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "known: " + ", ".join(known)


def axis_problem(name: str, value: Any) -> str:
    """Return why this axis, or the axes that an alias sets, cannot have `value`; "" if it can."""
    if name in AXIS_ALIASES:
        return next(filter(None, (axis_problem(axis, value) for axis in AXIS_ALIASES[name])), "")
    if name not in AXES:
        return _unknown_axis(name)
    value, hint = canonical(name, value), _HINTS[name]
    if hint is bool:
        return "" if isinstance(value, bool) else "must be true or false"
    if get_origin(hint) is Literal:
        return "" if value in get_args(hint) else _choice_problem(value, get_args(hint), AXES[name].metadata["aliases"])
    number, above = get_args(hint)
    return _number_problem(value, number is not float, above)


def canonical(name: str, value: Any) -> Any:
    """Return the main name of a value that has two names, e.g. old for recomputed."""
    aliases = AXES[name].metadata.get("aliases", {}) if name in AXES else {}
    return aliases.get(value, value) if isinstance(value, str) else value


def _unknown_axis(name: str) -> str:
    close = nearest(name, [*AXES, *AXIS_ALIASES])
    return f"unknown axis {name!r}: {close if close.endswith('?') else '`dppo-megatron objectives NAME` lists them'}"


def _choice_problem(value: Any, choices: tuple[str, ...], aliases: Mapping[str, str]) -> str:
    accepted = [*choices, *(f"{alias} (= {name})" for alias, name in aliases.items())]
    hint = nearest(value, [*choices, *aliases]) if isinstance(value, str) else ""
    return f"is not one of {', '.join(accepted)}. {hint}".rstrip(". ")


def _number_problem(value: Any, optional: bool, above: _Above) -> str:
    or_none = " or None" if optional else ""
    if value is None:
        return "" if optional else "must be a number, not None"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"must be a finite number{or_none}"
    if value != 0 and not _SMALLEST <= abs(value) <= _LARGEST:
        return f"must be a finite number{or_none}, of {_SMALLEST:g} to {_LARGEST:g}: the loss is computed in fp32"
    if not (value >= above.least if above.included else value > above.least):
        return f"must be {'at least' if above.included else 'above'} {above.least:g}"
    return ""
