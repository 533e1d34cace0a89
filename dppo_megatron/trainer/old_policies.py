"""What other policies say of a step's tokens: the weights the step starts from, and the run's start model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dppo_megatron.actor import Actor, Reference, Scores
from dppo_megatron.objectives import Objective
from dppo_megatron.types import TokenBatch

from .batches import StepBatch
from .metrics import StepMetrics


class OldPolicies:
    """Scores a step's micro-batches before its first update, as far as the objective asks; most ask for nothing.

    Recomputed: the current weights, which the step's updates then move away from. Reference: `model.path`,
    built here and only when needed. Each costs one forward pass over the step, timed as its own part.
    """

    def __init__(self, actor: Actor, objective: Objective):
        self._actor = actor
        self._recomputes = objective.needs_recomputed
        self._topk = objective.needs_topk
        self._reference = Reference(actor) if objective.needs_reference else None

    def score(self, batch: StepBatch, metrics: StepMetrics) -> StepBatch:
        """`batch` with the log-probs filled in. Collective: every rank has equally many micro-batches."""
        if self._recomputes:
            with metrics.timed("recompute"):
                batch = _filled(batch, lambda part: self._actor.scores(part, topk=self._topk), _recomputed)
        if self._reference is not None:
            with metrics.timed("reference"):
                batch = _filled(batch, self._reference.scores, _referred)
        return batch


def _filled(
    batch: StepBatch,
    score: Callable[[list[TokenBatch]], list[Scores]],
    fill: Callable[[TokenBatch, Scores], TokenBatch],
) -> StepBatch:
    updates = [
        replace(update, micro_batches=list(map(fill, update.micro_batches, score(update.micro_batches))))
        for update in batch.updates
    ]
    return replace(batch, updates=updates)


def _recomputed(tokens: TokenBatch, scores: Scores) -> TokenBatch:
    return replace(
        tokens,
        recomputed_logprob=scores.logprob,
        recomputed_topk_logprob=scores.topk_logprob,
        recomputed_other_logprob=scores.other_logprob,
    )


def _referred(tokens: TokenBatch, scores: Scores) -> TokenBatch:
    return replace(tokens, reference_logprob=scores.logprob)
