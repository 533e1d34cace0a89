"""The axes of a method: one frozen dataclass, its types, and which combinations make sense."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dppo_megatron.errors import ExpectedError

_SMALLEST, _LARGEST = 1e-30, 1e30  # what fp32 holds with room for a quotient or a product


class ObjectiveError(ExpectedError, ValueError):
    """A method that does not exist or does not make sense, or inputs it cannot work with."""


AdvantageKind = Literal["group_mean", "group_mean_std", "leave_one_out", "batch_normalised"]
AggregationKind = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum"]
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
        "none",
        doc="drop the gradient outside the region; a quadratic penalty everywhere, or only outside; nothing",
    )
    direction: str = _choice(
        "sampled",
        "predictive",
        "symmetric",
        doc="which tokens count as diverging: by A and r - 1; by A and the predicted change of D; all",
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
    penalty_delta: float | None = _number(
        above=0.0,
        doc="control 'mask_quadratic' on a TV divergence: scale of its penalty; None = delta",
    )
    epsilon_low: float | None = _number(above=0.0, doc="divergence 'ratio': the region reaches down to 1 - epsilon_low")
    epsilon_high: float | None = _number(above=0.0, doc="divergence 'ratio': the region reaches up to 1 + epsilon_high")
    dual_clip: float | None = _number(above=1.0, doc="PPO: no gradient where A < 0 and r > dual_clip; None = off")

    # The importance ratio that multiplies the advantage.
    importance: str = _choice(
        "rollout",
        "old",
        "none",
        doc="r = pi / mu, pi / old policy, or 1",
        aliases={"recomputed": "old"},
    )
    ratio_level: str = _choice("token", "sequence", doc="r of the token, or GSPO's geometric mean over the response")
    ratio_cap: float | None = _number(above=0.0, doc="r is truncated to at most this; None = no cap")
    ratio_floor: float | None = _number(at_least=0.0, doc="r is raised to at least this; None = no floor")
    gradient_path: str = _choice(
        "auto",
        "ratio",
        "logprob",
        doc="through r (a capped r has no gradient) or sg(r) ln pi (it has); auto = logprob iff capped",
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

    # Optional terms, off by default.
    reference_kl: str = _choice("none", "k1", "k2", "k3", doc="estimator of KL(pi || reference)")
    reference_kl_coefficient: float = _number(0.0, at_least=0.0, doc="weight of the KL to the reference policy")
    reference_kl_gradient: str = _choice(
        "unbiased",
        "estimator",
        doc="the gradient of the KL itself, or of the estimator as written",
    )
    entropy_coefficient: float = _number(0.0, at_least=0.0, doc="weight of the entropy bonus")

    def __post_init__(self) -> None:
        for name in AXES:
            object.__setattr__(self, name, canonical(name, getattr(self, name)))
        wrong = {name: axis_problem(name, getattr(self, name)) for name in AXES}
        problems = [f"{name}={getattr(self, name)!r} {why}" for name, why in wrong.items() if why]
        if not problems:
            problems = _combination_problems(self)
        if problems:
            raise ObjectiveError("; ".join(problems))

    @property
    def path(self) -> str:
        """The gradient path with 'auto' resolved: 'ratio' or 'logprob'."""
        if self.gradient_path != "auto":
            return self.gradient_path
        capped = self.ratio_cap is not None or self.ratio_floor is not None
        return "logprob" if capped or self.importance == "none" else "ratio"

    @property
    def measures_ratio(self) -> bool:
        return self.divergence == "ratio"

    @property
    def reads_topk(self) -> bool:
        """True when the method reads the rollout policy's top K."""
        return self.divergence in ("topk_tv", "topk_kl") or self.direction == "predictive"


AXES = {field.name: field for field in dataclasses.fields(ObjectiveSettings)}

# Names accepted beside the axes, and the axes that each sets.
AXIS_ALIASES = {"epsilon": ("epsilon_low", "epsilon_high")}

# Axes that only some combinations read. A preset's own value goes back to the default when an override takes
# away what it belonged to; one that the user wrote is an error, never silently without effect.
_CONDITIONAL = (
    (
        "delta",
        lambda s: s.control != "none" and not s.measures_ratio,
        "is the threshold of a TV or KL divergence; the ratio's bounds are epsilon_low and epsilon_high",
    ),
    (
        "epsilon_low",
        lambda s: s.control != "none" and s.measures_ratio,
        "bounds the ratio; the threshold of a TV or KL divergence is delta",
    ),
    (
        "epsilon_high",
        lambda s: s.control != "none" and s.measures_ratio,
        "bounds the ratio; the threshold of a TV or KL divergence is delta",
    ),
    (
        "penalty_delta",
        lambda s: s.control == "mask_quadratic" and not s.measures_ratio,
        "belongs to control='mask_quadratic' on a TV divergence; the ratio's penalty is scaled by its bounds",
    ),
    (
        "dual_clip",
        lambda s: s.control == "mask" and s.measures_ratio,
        "belongs to a mask on divergence='ratio'",
    ),
    ("anchor", lambda s: s.control != "none", "is the centre of a trust region, and control is 'none'"),
    ("direction", lambda s: s.control in ("mask", "mask_quadratic"), "belongs to a mask"),
    ("tail", lambda s: s.direction == "predictive", "belongs to direction='predictive'"),
    ("ratio_cap", lambda s: s.importance != "none", "needs an importance ratio"),
    ("ratio_floor", lambda s: s.importance != "none", "needs an importance ratio"),
    ("ratio_level", lambda s: s.importance != "none", "needs an importance ratio"),
    ("gradient_path", lambda s: s.importance != "none", "needs an importance ratio"),
    ("mismatch_high", lambda s: s.mismatch != "none", "belongs to mismatch='truncate' or 'mask'"),
    ("mismatch_low", lambda s: s.mismatch == "mask", "belongs to mismatch='mask'"),
    ("mismatch_level", lambda s: s.mismatch != "none", "belongs to mismatch='truncate' or 'mask'"),
    ("reference_kl_gradient", lambda s: s.reference_kl != "none", "belongs to reference_kl"),
    ("rejection_low", lambda s: s.rejection != "none", "belongs to rejection"),
    ("rejection_high", lambda s: s.rejection != "none", "belongs to rejection"),
)


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
    for name, applies, _ in _CONDITIONAL:
        if name not in given and not applies(draft):
            merged[name] = AXES[name].default
    return ObjectiveSettings(**merged)


def nearest(name: str, known: Any) -> str:
    """The closest of the known names as a question, or all of them when nothing is close."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
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
    if name.startswith("clip"):
        return (
            f"{name!r} is not an axis: the threshold of a TV or KL divergence is 'delta', the region of a "
            "ratio is 'epsilon_low' and 'epsilon_high', its truncation is 'ratio_cap' and 'ratio_floor'"
        )
    also = ", ".join(f"{alias!r} (sets {' and '.join(axes)})" for alias, axes in AXIS_ALIASES.items())
    return f"unknown axis {name!r}: {nearest(name, [*AXES, *AXIS_ALIASES])} Accepted beside the axes: {also}"


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


def _combination_problems(s: ObjectiveSettings) -> list[str]:
    problems = [
        f"{name}={getattr(s, name)!r} has no effect in this combination: it {why}"
        for name, applies, why in _CONDITIONAL
        if getattr(s, name) != AXES[name].default and not applies(s)
    ]

    def refuse(when: bool, text: str) -> None:
        if when:
            problems.append(text)

    region = s.control != "none"
    refuse(
        region and not s.measures_ratio and s.delta is None,
        f"divergence={s.divergence!r} with control={s.control!r} needs a threshold: set delta",
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
        s.ratio_level == "sequence" and region and not (s.measures_ratio and s.direction != "predictive"),
        "ratio_level='sequence' has a trust region for divergence='ratio' only, and no predictive direction",
    )
    refuse(
        s.dual_clip is not None and s.epsilon_high is not None and s.dual_clip <= 1 + s.epsilon_high,
        f"dual_clip={s.dual_clip} must be above 1 + epsilon_high",
    )
    refuse(
        s.ratio_cap is not None and s.ratio_floor is not None and s.ratio_floor > s.ratio_cap,
        f"ratio_floor={s.ratio_floor} is above ratio_cap={s.ratio_cap}",
    )
    refuse(
        s.supervised and (s.importance != "none" or region or s.mismatch != "none" or s.rejection != "none"),
        "supervised=true has no rollout policy: importance, control, mismatch and rejection must be 'none'",
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
    return problems
