"""Compute the objective's inputs for a whole step before its first update: log-probs, and a batch statistic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dppo_megatron.objectives import ObjectiveProtocol
from dppo_megatron.train.actor import Actor, Layout, Reference, TrainerTeacher
from dppo_megatron.types import TokenBatch

from .batches import StepBatch
from .metrics import StepMetrics


class PolicyLogprobs:
    """Adds the log-probs that the objective needs to a step's micro-batches, before the first update.

    Most objectives need no such log-probs. Old log-probs come from the current weights, before the step's updates
    change them. Reference log-probs come from the start model (`model.start`), and lists may come from a teacher in the
    trainer's memory. These models are built here only if needed. Each kind costs a forward pass over the step, timed
    separately.
    """

    def __init__(self, actor: Actor, objective: ObjectiveProtocol):
        self._needs_old = objective.needs_old
        self._old_scores = partial(actor.scores, topk=objective.needs_topk)
        self._reference = Reference(actor) if objective.needs_reference else None
        needs_trainer_teacher = objective.needs_teacher and actor.config.trainer_teacher is not None
        self._teacher = TrainerTeacher(actor) if needs_trainer_teacher else None

    def add(self, batch: StepBatch, metrics: StepMetrics) -> StepBatch:
        """Return `batch` with the log-probs added. Collective: every rank has equally many micro-batches."""
        if self._needs_old:
            with metrics.timed("recompute"):
                names = ("logprob", "topk_logprob", "other_logprob")
                batch = _scored(
                    batch,
                    lambda batches: [{f"old_{n}": getattr(s, n) for n in names} for s in self._old_scores(batches)],
                )
        if self._reference is not None:
            with metrics.timed("reference"):
                score = self._reference.scores
                batch = _scored(batch, lambda batches: [{"reference_logprob": s.logprob} for s in score(batches)])
        if self._teacher is not None:
            with metrics.timed("teacher"):
                batch = _scored(batch, self._teacher.with_lists)
        return batch


def with_batch_statistic(objective: ObjectiveProtocol, batch: StepBatch, layout: Layout) -> ObjectiveProtocol:
    """Return the objective with this step's statistic; an objective without a statistic is returned unchanged.

    The statistic covers all updates and data-parallel ranks, and uses the values that the loss uses. An objective with
    a statistic needs two collectives: an all-reduce over the data-parallel group, and a broadcast, because ranks with
    the same tokens must drop the same tokens despite rounding. Context-parallel ranks have the same tokens, which does
    not change a mean.
    """
    if not objective.needs_statistic or not batch.updates:
        return objective
    micro_batches = [tokens for update in batch.updates for tokens in update.micro_batches]
    sums = reduce(torch.add, (_statistic_sums(objective, tokens) for tokens in micro_batches)).to(layout.device)
    if layout.data_group.size() > 1:
        dist.all_reduce(sums, group=layout.data_group)
    if layout.world_size > 1:
        dist.broadcast(sums, src=0)
    return objective.with_statistic(sums.cpu())  # a running sum on the CPU has a fixed order


def _statistic_sums(objective: ObjectiveProtocol, tokens: TokenBatch) -> Tensor:
    old, rollout, advantage = tokens.old_logprob, tokens.rollout_logprob, tokens.advantage
    if old is None or rollout is None or advantage is None:
        raise ValueError("the objective's statistic needs old log-probs, rollout log-probs and advantages")
    teacher_fields = {"teacher_logprob": tokens.tensors["teacher_logprob"]} if objective.needs_teacher else {}
    return objective.statistic_sums(old, rollout, advantage, tokens.mask, **teacher_fields)


def _scored(batch: StepBatch, score: Callable[[list[TokenBatch]], list[dict[str, Any]]]) -> StepBatch:
    """Return `batch` with the fields that `score` returns for the micro-batches."""
    updates = []
    for update in batch.updates:
        scores = score(update.micro_batches)
        scored = [replace(tokens, **fields) for tokens, fields in zip(update.micro_batches, scores, strict=True)]
        updates.append(replace(update, micro_batches=scored))
    return replace(batch, updates=updates)
