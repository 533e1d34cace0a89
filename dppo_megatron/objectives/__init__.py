"""Reinforcement-learning objectives on [T]: pure torch, no process groups, no vocabulary dimension."""

from .advantages import ADVANTAGE_KINDS, RewardMoments, group_advantages, group_has_signal, reward_moments
from .aggregation import AGGREGATION_KINDS, BatchCounts, sequence_weights
from .corrections import keep_finished, sequence_ids_from_cu_seqlens, soft_overlong_penalty
from .inputs import TopKLogprobs
from .metrics import (
    Metric,
    effective_size_metric,
    flatten_metrics,
    max_metric,
    mean_metric,
    merge_metrics,
    min_metric,
    quantiles_metric,
    reduce_metrics,
    sum_metric,
    unflatten_metrics,
)
from .objective import Objective, ObjectiveOutput, build_objective
from .presets import PRESETS, Preset
from .settings import AXES, ObjectiveError, ObjectiveSettings

__all__ = [
    "ADVANTAGE_KINDS",
    "AGGREGATION_KINDS",
    "AXES",
    "PRESETS",
    "BatchCounts",
    "Metric",
    "Objective",
    "ObjectiveError",
    "ObjectiveOutput",
    "ObjectiveSettings",
    "Preset",
    "RewardMoments",
    "TopKLogprobs",
    "build_objective",
    "effective_size_metric",
    "flatten_metrics",
    "group_advantages",
    "group_has_signal",
    "keep_finished",
    "max_metric",
    "mean_metric",
    "merge_metrics",
    "min_metric",
    "quantiles_metric",
    "reduce_metrics",
    "reward_moments",
    "sequence_ids_from_cu_seqlens",
    "sequence_weights",
    "soft_overlong_penalty",
    "sum_metric",
    "unflatten_metrics",
]
