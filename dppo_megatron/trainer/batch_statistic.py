"""The one number of a step's tokens that some objectives want before the step's first micro-batch."""

from __future__ import annotations

import torch.distributed as dist

from dppo_megatron.actor import Layout
from dppo_megatron.objectives import Objective

from .batches import StepBatch


def with_batch_statistic(objective: Objective, batch: StepBatch, layout: Layout) -> Objective:
    """The objective for this step; most need no statistic and are returned as they are.

    Over the tokens of all updates and data-parallel ranks, from their old and rollout log-probs. Collective where the
    objective needs one: an all-reduce over the data-parallel group, and a broadcast, for ranks that hold the same
    tokens must drop the same ones, whatever the order of their additions. Context-parallel ranks hold the same tokens,
    which changes no mean.
    """
    if not getattr(objective, "needs_statistic", False) or not batch.updates:
        return objective
    sums = sum(
        objective.statistic_sums(tokens.old_logprob, tokens.rollout_logprob, tokens.advantage, tokens.mask)
        for update in batch.updates
        for tokens in update.micro_batches
    ).to(layout.device)
    if layout.data_group.size() > 1:
        dist.all_reduce(sums, group=layout.data_group)
    if layout.world_size > 1:
        dist.broadcast(sums, src=0)
    return objective.with_statistic(sums.cpu())  # where a running sum has one order
