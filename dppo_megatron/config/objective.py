"""Defines the section `objective`. The settings are the method's axes with their types."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue, ValidationError, ValidationInfo, field_validator

from dppo_megatron.errors import with_module
from dppo_megatron.objectives import PRESETS, ObjectiveError
from dppo_megatron.objectives.settings import (
    OTHER_BOUNDS,
    AdvantageKind,
    AggregationKind,
    CreditKind,
    axis_problem,
    bounds_of,
    canonical,
    nearest,
    override,
)

from .section import Count, Float, Section, refusal, setting


class ObjectiveConfig(Section):
    name: str = setting("dppo_binary_tv", "preset, or package.module:attribute")
    settings: dict[str, JsonValue] = setting(
        {},
        "axes of the preset to replace, e.g. delta: 0.2; `dppo-megatron objectives NAME` lists them. A custom "
        "objective defines its own",
    )
    advantage: AdvantageKind = setting("group_mean", "how rewards become advantages, see docs/objectives.md")
    credit: CreditKind = setting(
        "trajectory", "compare rewards of trajectories, or of each turn and the turns after it"
    )
    discount: Float = setting(1.0, "credit = turn: weight of a reward for the previous turn", gt=0, le=1)
    aggregation: AggregationKind = setting("seq_mean_token_sum_norm", "how the losses of tokens are averaged")
    horizon: Count | None = setting(None, "divisor of seq_mean_token_sum_norm; default: rollout.max_response_tokens")
    overlong_filter: bool = setting(
        False, "truncated responses carry no loss (DAPO); their rewards stay in the baseline"
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if ":" not in name and name not in PRESETS:
            raise refusal(f"unknown objective {name!r}: {with_module(name) or nearest(name, PRESETS)}")
        return name

    @field_validator("settings")
    @classmethod
    def _check_axes(cls, settings: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Check the settings against the `ObjectiveSettings` types. Every wrong axis gives an error that names it."""
        name = info.data.get("name")  # None: unknown; the axes are checked in any case
        if name is not None and name not in PRESETS:
            return settings  # a user's objective
        wrong = {axis: reason for axis, value in settings.items() if (reason := axis_problem(axis, value))}
        if name is not None:
            bounds = " and ".join(bounds_of(PRESETS[name].settings))
            instead = f"{bounds} instead" if bounds else "no trust region; remove it"
            wrong |= dict.fromkeys(wrong.keys() & OTHER_BOUNDS, f"objective {name} has {instead}")
        if wrong:
            raise ValidationError.from_exception_data(
                "objective.settings",
                [{"type": refusal(reason), "loc": (axis,), "input": settings[axis]} for axis, reason in wrong.items()],
            )
        if name is not None:
            try:
                override(PRESETS[name].settings, settings)
            except ObjectiveError as error:
                raise refusal(f"objective {name}: {error}") from None
        return {axis: canonical(axis, value) for axis, value in settings.items()}

    @property
    def divergence(self) -> str:
        """Return the preset's `divergence` axis with these settings; empty for a user's objective."""
        return override(PRESETS[self.name].settings, self.settings).divergence if self.name in PRESETS else ""

    @property
    def supervised(self) -> bool:
        """Return whether the objective learns from given answers, without rollouts and engines."""
        return self.name == "nll"
