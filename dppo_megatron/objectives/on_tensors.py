"""List the public names of `objectives` that compute on tensors; they are imported on first use."""

# ruff: noqa: F401

from .advantages import RewardMoments, group_advantages, group_has_signal, reward_moments, turn_advantages
from .aggregation import sequence_weights
from .contract import ObjectiveOutput, ObjectiveProtocol, TopKLogprobs
from .corrections import keep_finished, sequence_ids_from_cu_seqlens, soft_overlong_penalty
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
from .objective import Objective, build_objective
