"""Apply an objective to another trainer's padded rows, and list the presets that the trainer can use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dppo_megatron.objectives import (
    PRESETS,
    ObjectiveError,
    ObjectiveOutput,
    ObjectiveProtocol,
    build_objective,
    reduce_metrics,
)


def resolve(objective: str | ObjectiveProtocol, settings: dict[str, Any]) -> ObjectiveProtocol:
    """Build an objective from a preset name or "package.module:attribute" and settings, or return an instance."""
    if isinstance(objective, str):
        return build_objective(objective, **settings)
    if settings:
        raise ObjectiveError(f"objective {objective.name} is an instance; remove the settings {', '.join(settings)}")
    return objective


def unfit(objective: ObjectiveProtocol, *, topk: bool = False, old: bool = False, terms: bool = False) -> list[str]:
    """Return why a trainer's loss cannot be this objective.

    topk: whether the trainer supplies the engine's lists.
    old: whether it supplies a recomputed old policy in addition to the rollout policy.
    terms: whether it supplies a reference policy and entropies.
    """

    reasons = {
        "learns from given answers, not from samples": objective.settings.supervised,
        "reads the engine's list of likely tokens, which is not supplied": objective.needs_topk and not topk,
        "compares old and rollout policy, and only one is supplied": objective.needs_old and not old,
        "reads columns of the engine's reply": bool(objective.needs_columns),
        "takes a number of the whole batch, which comes in micro-batches": objective.needs_statistic,
        "learns from a teacher, which is not supplied": objective.needs_teacher,
        "adds its own KL to a reference policy": objective.needs_reference and not terms,
        "adds its own entropy bonus": objective.needs_entropy and not terms,
    }
    return [reason for reason, holds in reasons.items() if holds]


def refuse_unfit(objective: ObjectiveProtocol, trainer: str, reasons: list[str]) -> None:
    if reasons:
        raise ObjectiveError(f"objective {objective.name} cannot be a loss of {trainer}: it {'; it '.join(reasons)}")


def presets_for(reasons: Any) -> list[str]:
    """Return the presets that a trainer can use, because `reasons(objective)` is empty."""
    return [name for name in PRESETS if not reasons(build_objective(name))]


def on_rows(objective: ObjectiveProtocol, *, mask: Tensor, **tensors: Any) -> ObjectiveOutput:
    """Apply the objective to rows [B, T], one response per row. Outputs are [B T], in row order.

    tensors: inputs for the objective's call, [B, T] or [B, 1]; None = not given. `topk` is [B T, K] already.
    """
    rows, length = mask.shape
    inputs: dict[str, Any] = {
        name: value if name == "topk" else value.expand(rows, length).reshape(-1)
        for name, value in tensors.items()
        if value is not None
    }
    ids = torch.arange(rows, device=mask.device)[:, None].expand(rows, length)
    return objective(mask=mask.reshape(-1), sequence_ids=ids.reshape(-1), **inputs)


def averaged(out: ObjectiveOutput) -> dict[str, float]:
    """Return the metrics that may be averaged over micro-batches and ranks: kinds 'mean' and 'effective_size'.

    Every call returns equal names. A metric without tokens is 0, as in the trainers' losses. Synchronizes with the
    device.
    """
    means = {name: m for name, m in out.metrics.items() if m.kind in ("mean", "effective_size")}
    return dict.fromkeys(means, 0.0) | reduce_metrics(means)
