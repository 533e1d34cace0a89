"""Old and reference log-probs of a step's tokens: by the weights the step starts from, and by the run's start model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dppo_megatron.actor import Actor, Reference, Scores
from dppo_megatron.objectives import Objective
from dppo_megatron.types import TokenBatch

from .batches import StepBatch
from .metrics import StepMetrics


class PolicyLogprobs:
    """Adds to a step's micro-batches, before its first update, the log-probs that the objective needs; most need none.

    Old: by the current weights, which the step's updates then move away from. Reference: by `model.path`, built
    here and only when needed. Each costs one forward pass over the step, timed as its own part.
    """

    def __init__(self, actor: Actor, objective: Objective):
        self._actor = actor
        self._needs_old = objective.needs_old
        self._topk = objective.needs_topk
        self._reference = Reference(actor) if objective.needs_reference else None

    def add(self, batch: StepBatch, metrics: StepMetrics) -> StepBatch:
        """`batch` with the log-probs added. Collective: every rank has equally many micro-batches."""
        if self._needs_old:
            with metrics.timed("recompute"):
                batch = _score(batch, lambda part: self._actor.scores(part, topk=self._topk), _add_old)
        if self._reference is not None:
            with metrics.timed("reference"):
                batch = _score(batch, self._reference.scores, _add_reference)
        return batch


def _score(
    batch: StepBatch,
    score: Callable[[list[TokenBatch]], list[Scores]],
    add: Callable[[TokenBatch, Scores], TokenBatch],
) -> StepBatch:
    updates = [
        replace(update, micro_batches=list(map(add, update.micro_batches, score(update.micro_batches))))
        for update in batch.updates
    ]
    return replace(batch, updates=updates)


def _add_old(tokens: TokenBatch, scores: Scores) -> TokenBatch:
    return replace(
        tokens,
        old_logprob=scores.logprob,
        old_topk_logprob=scores.topk_logprob,
        old_other_logprob=scores.other_logprob,
    )


def _add_reference(tokens: TokenBatch, scores: Scores) -> TokenBatch:
    return replace(tokens, reference_logprob=scores.logprob)
