"""Define a method's axes as a frozen dataclass, with the type and the branch of each axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from dppo_megatron.errors import ExpectedError, did_you_mean

from .rules import BRANCHES, combination_problems

_SMALLEST, _LARGEST = 1e-30, 1e30  # range of fp32, with room for a quotient or a product


class ObjectiveError(ExpectedError, ValueError):
    """Raised for an unknown method, contradicting settings, or inputs that the method cannot use."""


AdvantageKind = Literal["group_mean", "group_mean_std", "leave_one_out", "batch_normalised", "batch_mean"]
AggregationKind = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum"]
CreditKind = Literal["trajectory", "turn"]
ADVANTAGE_KINDS: tuple[AdvantageKind, ...] = get_args(AdvantageKind)
AGGREGATION_KINDS: tuple[AggregationKind, ...] = get_args(AggregationKind)


@dataclass(frozen=True)
class _Above:
    """Requires a number above `bound`, or equal to it if `included`."""

    bound: float
    included: bool = False


Positive = Annotated[float | None, _Above(0)]
NotNegative = Annotated[float | None, _Above(0, included=True)]
AboveOne = Annotated[float | None, _Above(1)]
AtLeastOne = Annotated[float | None, _Above(1, included=True)]
Weight = Annotated[float, _Above(0, included=True)]
TokenDivergence = Literal["k1", "k2", "k3", "ratio", "binary_tv", "binary_kl", "kl_either", "topk_tv", "topk_kl"]


def _axis(
    doc: str,
    default: Any = None,
    *,
    of: str | None = None,
    needed_by: str | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Any:
    """Declare an axis. of, needed_by: the branch in `rules.BRANCHES` that uses or requires the axis."""
    meta = {"doc": doc, "of": of or needed_by, "required": needed_by is not None, "aliases": aliases or {}}
    return dataclasses.field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Contains a method's axes. mu = rollout policy, pi = policy in training, a = sampled token, A = advantage.

    The constructor validates all axes and raises one ObjectiveError that names every wrong axis.
    """

    # The trust region: the divergence, the control outside, the harmful side, and the anchor.
    divergence: Literal["binary_tv", "binary_kl", "kl_either", "topk_tv", "topk_kl", "ratio"] = _axis(
        "distance of pi from its anchor; 'ratio' is PPO's |r - 1|, 'kl_either' the larger KL of both directions",
        "binary_tv",
    )
    control: Literal["mask", "quadratic", "mask_quadratic", "gate", "none"] = _axis(
        "drop the gradient outside the region; penalise every token, or only outside; weight smoothly; do nothing",
        "mask",
    )
    direction: Literal["sampled", "predictive", "symmetric", "negative"] = _axis(
        "tokens count as diverging by A and r - 1; by A and the predicted change of D; always; by A and r - 1, only "
        "where A < 0",
        "sampled",
        of="mask",
    )
    tail: Literal["aggregated", "uniform"] = _axis(
        "direction 'predictive': the mass outside the top K counts as one token, or is spread evenly over all others",
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
    delta_low: Positive = _axis("threshold where r < 1, so the token became rarer; None = delta", of="mass mask")
    position_weight: Positive = _axis(
        "weight of D at the last token of a response, linear from 1 at its first; None = 1 (CPPO)", of="mass mask"
    )
    prefix_budget: NotNegative = _axis(
        "the threshold shrinks where the mean D of the earlier tokens is above this; None = off (CPPO)", of="mass mask"
    )
    prefix_budget_ceiling: AtLeastOne = _axis(
        "a response's own D raises prefix_budget by at most this factor; None = 2 (CPPO)", of="prefix budget"
    )
    exempt_below: Positive = _axis(
        "tokens with mu below this have no region; None = every token has a region", of="mask"
    )
    exempt_side: Literal["both", "low", "high"] = _axis(
        "exempt_below applies to any r, only to r < 1, or only to r > 1", "both", of="exemption"
    )
    free_low: Positive = _axis(
        "TV or KL divergence: tokens with r from 1 - free_low to 1 + free_high are never outside; None = 0",
        of="mass mask",
    )
    free_high: Positive = _axis("upper end of that range (a default of BandPO's code); None = 0", of="mass mask")
    penalty_delta: Positive = _axis(
        "control 'mask_quadratic' on a TV divergence: scale of its penalty; None = delta", of="second scale"
    )
    epsilon_low: Positive = _axis(
        "divergence 'ratio': the lower bound of r is 1 - epsilon_low", needed_by="ratio bounds"
    )
    epsilon_high: Positive = _axis(
        "divergence 'ratio': the upper bound of r is 1 + epsilon_high", needed_by="ratio bounds"
    )
    dual_clip: AboveOne = _axis(
        "PPO: no gradient where A < 0 and r > dual_clip; gate 'inverse': its largest weight; None = off", of="dual clip"
    )
    penalty: Literal["l2", "tv", "kl", "k3"] = _axis(
        "quadratic controls: the penalised distance (the DRPO paper's ablation)", "l2", of="sampled penalty"
    )
    penalty_weight: Literal["advantage", "one"] = _axis(
        "quadratic controls: factor of the penalty, |A| or 1", "advantage", of="sampled penalty"
    )
    gate: Literal["sigmoid", "gaussian", "inverse", "gamma"] = _axis(
        "control 'gate': the smooth weight of SAPO, MASPO, ASPO or VESPO", "sigmoid", of="gate"
    )
    gate_positive: Positive = _axis("sigmoid tau, gaussian beta or gamma lambda where A > 0", needed_by="signed gate")
    gate_negative: Positive = _axis("sigmoid tau, gaussian beta or gamma lambda where A < 0", needed_by="signed gate")
    gate_power_positive: Positive = _axis("gate 'gamma': its power k where A > 0", needed_by="gamma gate")
    gate_power_negative: Positive = _axis("gate 'gamma': its power k where A < 0", needed_by="gamma gate")
    gate_width: Positive = _axis("gate 'gaussian': its width for a token of probability 1", needed_by="gaussian gate")
    gate_width_max: Positive = _axis(
        "gate 'gaussian': its largest width, for the rarest tokens", needed_by="gaussian gate"
    )
    gate_mass_power: Positive = _axis(
        "gate 'gaussian': its width is proportional to mu to the power of minus this", needed_by="gaussian gate"
    )

    # A second region, for whole responses, with any control.
    response_region: Literal["none", "mean", "max"] = _axis(
        "drop tokens of responses in which the mean or the largest D of a token is too large", "none"
    )
    response_divergence: TokenDivergence = _axis(
        "response region: D of a token from mu; k1, k2, k3 = -ln r, (ln r)^2 / 2, r - 1 - ln r",
        "k1",
        of="response region",
    )
    response_delta: Positive = _axis("response region: threshold of D", needed_by="response region")
    response_sign: Literal["any", "harmful", "negative"] = _axis(
        "response region: drop all tokens, those that diverge further, or those with A < 0", "any", of="response region"
    )

    # The importance ratio that multiplies the advantage.
    importance: Literal["rollout", "old", "none"] = _axis(
        "r = pi / mu, pi / old policy, or 1", "rollout", aliases={"recomputed": "old"}
    )
    ratio_level: Literal["token", "sequence", "product", "prefix_minimum"] = _axis(
        "r of the token; geometric mean (GSPO) or product over the response; r times the least earlier r (MinPRO)",
        "token",
        of="ratio",
    )
    ratio_cap: Positive = _axis("r is capped at this; None = no cap", of="ratio")
    ratio_floor: NotNegative = _axis("r is raised to at least this; None = no floor", of="ratio")
    ratio_cap_negative: Positive = _axis("the cap where A < 0; None = ratio_cap", of="ratio")
    ratio_floor_negative: NotNegative = _axis("the floor where A < 0; None = ratio_floor", of="ratio")
    gradient_path: Literal["auto", "ratio", "logprob", "through"] = _axis(
        "'ratio': through r, without gradient where r is capped; 'logprob': sg(r) ln pi, which keeps it; 'through': the"
        " value of 'ratio', the gradient of 'logprob'; 'auto': 'logprob' if r is capped, else 'ratio'",
        "auto",
        of="ratio",
    )
    centering: Literal["none", "policy"] = _axis(
        "subtract the weighted score that mu expects, over the engine's list (score centering)", "none"
    )
    batch_statistic: Literal["none", "second_moment", "second_moment_clip", "effective_size"] = _axis(
        "by old / mu of the whole batch: drop the largest |ln r| (M2PO), as in the paper or as in its released code; or"
        " cap r and weight the KL to mu (P3O)",
        "none",
    )
    second_moment_budget: Positive = _axis(
        "M2PO: upper bound of the mean of (ln r)^2 over the tokens that move away (A ln r > 0)",
        needed_by="second moment",
    )
    supervised: bool = _axis("plain negative log-likelihood: A = 1, no rollout policy", False)

    # Corrections of the mismatch between the engine and the trainer, off by default.
    mismatch: Literal["none", "truncate", "mask"] = _axis(
        "cap the factor trainer / engine at mismatch_high (TIS), or drop tokens outside its bounds", "none", of="ratio"
    )
    mismatch_level: Literal["token", "sequence", "geometric"] = _axis(
        "mismatch ratio of the token, or its product or geometric mean over the response", "token", of="mismatch"
    )
    mismatch_low: NotNegative = _axis("lower bound of the ratio for mismatch 'mask'; None = none", of="mismatch mask")
    mismatch_high: Positive = _axis("upper bound of the mismatch ratio", needed_by="mismatch")
    rejection: Literal["none", "geometric", "sequence", "any_token"] = _axis(
        "drop a response if this mismatch ratio ('any_token': that of any token) is outside the bounds", "none"
    )
    rejection_low: NotNegative = _axis("lower bound of rejection's ratio; None = none", of="rejection")
    rejection_high: Positive = _axis("upper bound of rejection's ratio; None = none", of="rejection")
    outlier_low: NotNegative = _axis(
        "in addition to another rejection: drop a response if any token's mismatch ratio is below this; None = none"
    )
    outlier_high: Positive = _axis("drop a response if any token's mismatch ratio is above this; None = none")

    # Optional terms, off by default.
    reference_kl: Literal["none", "k1", "k2", "k3"] = _axis("estimator of KL(pi || reference)", "none")
    reference_kl_coefficient: Weight = _axis("weight of the KL to the reference policy", 0.0, needed_by="reference")
    reference_kl_gradient: Literal["unbiased", "estimator"] = _axis(
        "the gradient of the KL itself, or of the estimator as written", "unbiased", of="reference"
    )
    rollout_kl: Literal["none", "squared", "k3", "topk_squared"] = _axis(
        "KL to the rollout policy on every token: (ln r)^2, ln r + 1/r - 1, or E_mu (ln r)^2 over its top K",
        "none",
    )
    rollout_kl_coefficient: Weight = _axis("weight of the KL to the rollout policy", 0.0, needed_by="rollout")
    entropy_coefficient: Weight = _axis("weight of the entropy bonus", 0.0)

    # Distillation from a teacher, off by default.
    distillation: Literal["none", "forward_kl", "reverse_kl", "jensen_shannon", "sampled"] = _axis(
        "over the teacher's top K: KL(teacher || pi), KL(pi || teacher), between both; or add ln(teacher / pi) to A",
        "none",
    )
    distillation_coefficient: Weight = _axis("weight of the distillation", 0.0, needed_by="distillation")
    distillation_clip: Positive = _axis(
        "largest divergence of a token, or |ln(teacher / pi)|; None = no limit", of="distillation"
    )
    distillation_steps: Positive = _axis(
        "steps over which the weight changes to distillation_end; None = constant", of="distillation"
    )
    distillation_end: NotNegative = _axis("the weight after distillation_steps; None = 0", of="distillation schedule")
    jensen_shannon_weight: Weight = _axis(
        "share of the teacher in the mixture, below 1", 0.5, needed_by="jensen shannon"
    )
    advantage_weight: Weight = _axis("factor of A; 0 = distillation alone", 1.0, of="distillation")

    def __post_init__(self) -> None:
        for name in AXES:
            object.__setattr__(self, name, canonical(name, getattr(self, name)))
        axis_problems = {name: axis_problem(name, getattr(self, name)) for name in AXES}
        problems = [f"{name}={getattr(self, name)!r} {problem}" for name, problem in axis_problems.items() if problem]
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
        return region or responses or self.centering != "none" or self.rollout_kl == "topk_squared"


AXES = {field.name: field for field in dataclasses.fields(ObjectiveSettings)}
_HINTS = get_type_hints(ObjectiveSettings, include_extras=True)

# Names accepted in addition to the axes, and the axes that each name sets.
AXIS_ALIASES = {"epsilon": ("epsilon_low", "epsilon_high")}

_BOUNDS = "delta (of a ratio, epsilon_low and epsilon_high)"
_OTHER_NAMES = {
    _BOUNDS: "clip clip_coef clip_eps clip_epsilon clip_param clip_range clip_ratio cliprange eps_clip epsilon",
    "epsilon_low": "clip_low clip_ratio_low cliprange_low clip_range_low eps_low eps_clip_low ratio_clip_min",
    "epsilon_high": "clip_high clip_ratio_high cliprange_high clip_range_high eps_high eps_clip_high ratio_clip_max",
    "dual_clip": "clip_ratio_c eps_clip_c ratio_clip_c",
    "ratio_cap": "is_cap tis_clip tis_imp_ratio_cap truncated_importance_sampling_ratio vllm_importance_sampling_cap",
    "reference_kl": "kl_loss_type kl_estimator kl_penalty kl_type use_kl_loss",
    "reference_kl_coefficient (with reference_kl)": "kl_coef kl_coeff kl_loss_coef init_kl_coef kl_beta beta "
    "kl_weight reference_policy_kl_penalty",
    "entropy_coefficient": "ent_coef entropy_coef entropy_coeff entropy_loss_coef entropy_weight",
}
# Names in TRL, verl, OpenRLHF, slime, NeMo-RL and others, and our axis for each.
OTHER_NAMES = {name: ours for ours, names in _OTHER_NAMES.items() for name in names.split()}
# Names that stand for different axes in different methods; `bounds_of` returns those axes.
OTHER_BOUNDS = {name for name, ours in OTHER_NAMES.items() if ours == _BOUNDS} - AXIS_ALIASES.keys()


def override(base: ObjectiveSettings, overrides: dict[str, Any]) -> ObjectiveSettings:
    """Return `base` with some axes replaced; a name in AXIS_ALIASES sets several axes.

    Raises ObjectiveError for an unknown axis (with the nearest name), an ill-typed value, or a meaningless combination.
    """
    axis_values = dict(overrides)
    for alias, axes in AXIS_ALIASES.items():
        if alias in axis_values:
            axis_values = dict.fromkeys(axes, axis_values.pop(alias)) | axis_values
    if unknown := [_unknown_axis(name) for name in axis_values if name not in AXES]:
        raise ObjectiveError("; ".join(unknown))
    merged = {**{name: getattr(base, name) for name in AXES}, **axis_values}
    draft = object.__new__(ObjectiveSettings)
    for name, value in merged.items():
        object.__setattr__(draft, name, value)
    for name, field in AXES.items():
        branch = field.metadata["of"]
        if branch is not None and name not in axis_values and not BRANCHES[branch][0](draft):
            merged[name] = field.default
    return ObjectiveSettings(**merged)


def bounds_of(settings: ObjectiveSettings) -> list[str]:
    """Return the axes that bound a method's trust region or gate 'inverse'; empty for a method without bounds."""
    axes = ("delta", "epsilon_low", "epsilon_high")
    return [axis for axis in axes if BRANCHES[AXES[axis].metadata["of"]][0](settings)]


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the known names nearest to `name` as a question, or all names if none is near."""
    return did_you_mean(name, names, f"known: {', '.join(sorted(names))}")


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
    number, limit = get_args(hint)
    return _number_problem(value, number is not float, limit)


def canonical(name: str, value: Any) -> Any:
    """Return the main name of a value that has two names, e.g. old for recomputed."""
    aliases = AXES[name].metadata.get("aliases", {}) if name in AXES else {}
    return aliases.get(value, value) if isinstance(value, str) else value


def _unknown_axis(name: str) -> str:
    if name in OTHER_NAMES:
        return f"unknown axis {name!r}; did you mean {OTHER_NAMES[name]}?"
    hint = did_you_mean(name, [*AXES, *AXIS_ALIASES], "`dppo-megatron objectives NAME` lists the axes to pass by name")
    return f"unknown axis {name!r}: {hint}"


def _choice_problem(value: Any, choices: tuple[str, ...], aliases: Mapping[str, str]) -> str:
    accepted = [*choices, *(f"{alias} (= {name})" for alias, name in aliases.items())]
    hint = did_you_mean(value, [*choices, *aliases]) if isinstance(value, str) else ""
    return f"is not one of {', '.join(accepted)}. {hint}".rstrip(". ")


def _number_problem(value: Any, optional: bool, limit: _Above) -> str:
    or_none = " or None" if optional else ""
    if value is None:
        return "" if optional else "must be a number, not None"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"must be a finite number{or_none}"
    if value != 0 and not _SMALLEST <= abs(value) <= _LARGEST:
        return f"must be a finite number{or_none}, of {_SMALLEST:g} to {_LARGEST:g}: the loss is computed in fp32"
    if not (value >= limit.bound if limit.included else value > limit.bound):
        return f"must be {'at least' if limit.included else 'above'} {limit.bound:g}"
    return ""
