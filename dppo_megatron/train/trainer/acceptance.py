"""Bound a whole step by a trust region: measure how far it moved the policy, and revert it if that is too far.

A mask decides which tokens have a gradient. It does not bound how far all gradients in a step move the policy through
Adam. Here the new weights score the step's tokens again before they are published.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dppo_megatron.config import Config
from dppo_megatron.config.model import AcceptanceConfig
from dppo_megatron.objectives import ObjectiveProtocol, sequence_ids_from_cu_seqlens
from dppo_megatron.objectives.divergence import binary_kl, binary_tv
from dppo_megatron.objectives.settings import override
from dppo_megatron.train.actor import Actor, Scores, StepLine, apply_objective
from dppo_megatron.types import TokenBatch

from .batches import StepBatch

log = logging.getLogger(__name__)

_GROWTH = 2**0.5  # factor on the learning-rate scale after a step that stayed well within the bound


@dataclass(frozen=True)
class Accepted:
    """Describes where a step ends on the line from the start (fraction 0) to the whole step (fraction 1).

    fraction: accepted fraction of the step.
    divergence: divergence at the accepted fraction.
    whole: divergence after the whole step.
    rejected: number of fractions beyond the bound.
    Example: fraction 0.5, divergence 0.01, whole 0.03, rejected 1 if half the step is kept.
    """

    fraction: float
    divergence: float
    whole: float
    rejected: int


def accept(settings: AcceptanceConfig, line: StepLine, measure: Callable[[], float]) -> Accepted:
    """Keep the whole step if `measure()` is within the bound, else half, a quarter, ..., and finally nothing.

    A step within the bound is not changed. The start is kept regardless of divergence, because it was accepted before,
    with fresher rollouts or an engine that computes as the trainer does.
    """
    assert settings.bound is not None  # otherwise no step is measured
    whole = divergence = measure()
    fraction, rejected = 1.0, 0
    while fraction > 0 and not divergence <= settings.bound:
        rejected += 1
        fraction = fraction / 2 if rejected <= settings.halvings else 0.0
        line.go_to(fraction)
        divergence = measure()
    if rejected and settings.moments == "reset":
        line.reset_moments()
    return Accepted(fraction, divergence, whole, rejected)


def lr_scale_after(settings: AcceptanceConfig, scale: float, accepted: Accepted) -> float:
    """Return the next step's learning-rate scale, the trust-region radius, from the scale of this step.

    A partly kept step should have been smaller by the kept fraction. A step that was fully reverted to a start within
    the bound should have been smaller than the smallest fraction tried. If the start itself is beyond the bound, the
    scale does not change.
    """
    if settings.learning_rate == "keep" or settings.bound is None:
        return scale
    if accepted.fraction == 1:
        return min(1.0, scale * _GROWTH) if accepted.whole <= settings.bound / 2 else scale
    if accepted.fraction > 0:
        return scale * accepted.fraction
    return scale * 0.5 ** (settings.halvings + 1) if accepted.divergence <= settings.bound else scale


class Acceptance:
    """Applies the config's `acceptance`: call `begin` before a step's first update, and `settle` after the last update.

    All ranks must call both. A decision depends on earlier steps only through the actor's `lr_scale`. Checkpoints
    contain `lr_scale`, so a resumed run takes the same decisions as an uninterrupted run.
    """

    def __init__(self, config: Config, actor: Actor, objective: ObjectiveProtocol):
        self._settings = config.acceptance
        self._seed = config.run.seed
        self._actor = actor
        if objective.needs_teacher:  # the divergence from the anchor does not depend on the teacher
            objective = replace(objective, settings=override(objective.settings, {"distillation": "none"}))  # type: ignore[type-var]
        self._objective = objective
        self._topk = config.acceptance.divergence == "objective" and objective.needs_topk
        self._line = StepLine(actor) if config.acceptance.bound is not None else None
        self._begin_s = 0.0

    def begin(self) -> None:
        """Record the start of the step."""
        if self._line is not None:
            started = time.perf_counter()
            self._line.mark_start()
            self._begin_s = time.perf_counter() - started

    def settle(self, batch: StepBatch, step: int) -> dict[str, float]:
        """Move the policy back along the step as far as the bound requires; return metrics, empty if not measured.

        batch: the data that the updates used, including old log-probs.
        """
        line, bound = self._line, self._settings.bound
        if line is None or bound is None or not batch.updates:
            return {}
        started = time.perf_counter() - self._begin_s
        part = self._part(batch, step)
        accepted = accept(self._settings, line, lambda: self._measure(part))
        lr_scale = self._actor.lr_scale
        self._actor.lr_scale = lr_scale_after(self._settings, lr_scale, accepted)
        if accepted.rejected:
            log.info(
                "step %d: %s divergence %.3g is beyond acceptance.bound = %g; %s of the step is kept, at %.3g; "
                "the learning rate is scaled by %.3g from here on",
                step,
                self._settings.statistic,
                accepted.whole,
                bound,
                f"{accepted.fraction:g}" if accepted.fraction else "nothing",
                accepted.divergence,
                self._actor.lr_scale,
            )
        return {
            "acceptance/divergence": accepted.divergence,
            "acceptance/divergence_whole": accepted.whole,
            "acceptance/bound": bound,
            "acceptance/fraction": accepted.fraction,
            "acceptance/lr_scale": lr_scale,
            "acceptance/rejected": float(accepted.rejected),
            "time/acceptance_s": time.perf_counter() - started,
        }

    def _part(self, batch: StepBatch, step: int) -> list[TokenBatch]:
        """Draw equally many micro-batches on every data-parallel rank, the same whenever this step is trained."""
        micro_batches = [tokens for update in batch.updates for tokens in update.micro_batches]
        count = max(1, round(self._settings.share * len(micro_batches)))
        indices = np.random.default_rng([self._seed, step]).choice(len(micro_batches), count, replace=False)
        return [micro_batches[i] for i in sorted(indices)]

    def _measure(self, part: list[TokenBatch]) -> float:
        """Return the statistic of D over all data-parallel ranks, equal on every rank; inf if not finite.

        Collectives: `Actor.scores`, two all-reduces over data-parallel ranks, a broadcast from rank 0.
        """
        values = [
            self._divergence(tokens, scores)[tokens.mask]
            for tokens, scores in zip(part, self._actor.scores(part, topk=self._topk), strict=True)
        ]
        divergences = torch.cat(values).double()
        largest = divergences.max() if len(divergences) else divergences.new_zeros(())
        sums = torch.stack([divergences.sum(), divergences.new_tensor(float(len(divergences))), largest])
        sums = sums.to(self._actor.layout.device)
        group = self._actor.layout.data_group
        dist.all_reduce(sums[:2], group=group)
        dist.all_reduce(sums[2:], op=dist.ReduceOp.MAX, group=group)
        dist.broadcast(sums, src=0)
        total, count, largest = sums.tolist()
        if not np.isfinite(total):
            return float("inf")
        return largest if self._settings.statistic == "max" else total / max(count, 1.0)

    @torch.no_grad()
    def _divergence(self, tokens: TokenBatch, scores: Scores) -> Tensor:
        """Return D [T] for the scored policy: the objective's divergence, or binary TV or KL from mu."""
        kind = self._settings.divergence
        if kind != "objective":
            divergence = binary_tv if kind == "binary_tv" else binary_kl
            assert tokens.rollout_logprob is not None  # this run trains on rollouts
            return divergence(tokens.rollout_logprob, scores.logprob)
        return apply_objective(
            self._objective,
            tokens,
            logprob=scores.logprob,
            topk_logprob=scores.topk_logprob,
            other_logprob=scores.other_logprob,
            entropy=torch.zeros_like(scores.logprob) if self._objective.needs_entropy else None,
            sequence_ids=sequence_ids_from_cu_seqlens(tokens.cu_seqlens, len(tokens.token_ids)),
            vocab_size=self._actor.hf.vocab_size,
        ).divergence
