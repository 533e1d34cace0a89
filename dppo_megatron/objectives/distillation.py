"""Compute the divergence from a teacher over its top K, the sampled token and the rest, with its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .contract import TeacherLogprobs
from .inputs import Tokens, teacher_buckets
from .metrics import Metric, mean_metric
from .settings import ObjectiveSettings

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Taught:
    """Contains the distillation of every token, all [T].

    loss: its term before the coefficient, with gradient; 0 for 'sampled'. advantage: what 'sampled' adds to A, else 0.
    divergence: D before the clip. gap: ln pi - ln teacher of the sampled token, an estimate of KL(pi || teacher).
    teacher_rest, policy_rest: mass outside the list and the sampled token. Only `loss` has a gradient.
    """

    loss: Float[Tensor, " T"]
    advantage: Float[Tensor, " T"]
    divergence: Float[Tensor, " T"]
    gap: Float[Tensor, " T"]
    teacher_rest: Float[Tensor, " T"]
    policy_rest: Float[Tensor, " T"]

    def metrics(self, coefficient: float, dropped: Tensor, mask: Tensor) -> dict[str, Metric]:
        """Return the metrics of a call. dropped: [T] tokens that masks leave out."""
        return {
            "distillation/divergence": mean_metric(self.divergence, mask),
            "distillation/sampled_kl": mean_metric(self.gap, mask),
            "distillation/tail_mass_teacher": mean_metric(self.teacher_rest, mask),
            "distillation/tail_mass_policy": mean_metric(self.policy_rest, mask),
            "distillation/dropped_share": mean_metric(dropped, mask),
            "distillation/coefficient": mean_metric(torch.full_like(self.gap, coefficient), mask),
        }


def distill(name: str, s: ObjectiveSettings, tokens: Tokens, teacher: TeacherLogprobs) -> Taught:
    """Return the term of `distillation`. p = pi and t = teacher over disjoint events v that cover the vocabulary.

    The events are the tokens of the teacher's list, the sampled token, and all others as one. Merging tokens never
    raises a divergence, so each is a lower bound of the one over the vocabulary, and equal to it if K is all of it.

        forward_kl      sum t ln(t / p)                                    d D / d ln p = -t
        reverse_kl      sum p ln(p / t)                                                    p ln(p / t)
        jensen_shannon  b sum t ln(t / m) + (1 - b) sum p ln(p / m)                        (1 - b) p ln(p / m)
                        m = b t + (1 - b) p  (GKD, arXiv 2306.13649)

    The slopes omit multiples of p, which add nothing because sum p grad ln p = 0. If pi has no rest, as with a sampling
    mask that the list covers, the teacher is renormalised over the other events. A token with D above
    `distillation_clip` has its loss and gradient scaled by clip / D. A rest of the teacher below the rounding of 1 -
    sum(t) counts as 0 in forward_kl and as that rounding elsewhere, so that no divergence is infinite.
    """
    buckets = teacher_buckets(name, tokens, teacher)
    sampled = buckets.anchor_logprob[:, -1]
    gap = torch.where(tokens.mask, tokens.detached_logprob - sampled, tokens.zeros)
    rest_exists = tokens.mask & buckets.policy_other_logprob.isfinite()
    present = torch.cat([buckets.present, rest_exists[:, None]], dim=1)
    ln_p = torch.cat([buckets.policy_logprob, buckets.policy_other_logprob[:, None]], dim=1)
    ln_p = torch.where(present, ln_p, 0.0)
    with torch.no_grad():
        p = ln_p.exp() * present
        t = torch.cat([buckets.anchor, buckets.anchor_other[:, None]], dim=1) * present
        tiny = torch.finfo(t.dtype).tiny
        total = t.sum(dim=1, keepdim=True).clamp(min=tiny)
        ln_rest = buckets.anchor_other.clamp(min=tiny if s.distillation == "forward_kl" else buckets.noise).log()
        ln_t = (torch.cat([buckets.anchor_logprob, ln_rest[:, None]], dim=1) - total.log()) * present
        t = t / total
        if s.distillation == "jensen_shannon":
            b = s.jensen_shannon_weight
            ln_m = torch.logaddexp(ln_t + math.log(b), ln_p + math.log(1 - b))
            slope = (1 - b) * p * (ln_p - ln_m)
            divergence = (b * t * (ln_t - ln_m) + slope).sum(dim=1)
        elif s.distillation == "forward_kl":
            slope = -t
            divergence = (t * (ln_t - ln_p)).sum(dim=1)
        else:
            slope = p * (ln_p - ln_t)
            divergence = slope.sum(dim=1)
        divergence = divergence.clamp(min=0.0)
        scale = torch.ones_like(divergence)
        if s.distillation_clip is not None:
            scale = s.distillation_clip / divergence.clamp(min=s.distillation_clip)
    loss, advantage = tokens.zeros, tokens.zeros
    if s.distillation == "sampled":
        advantage = -gap if s.distillation_clip is None else -gap.clamp(-s.distillation_clip, s.distillation_clip)
    else:
        loss = scale * (divergence + (slope * (ln_p - ln_p.detach())).sum(dim=1))
    return Taught(loss, advantage, divergence, gap, t[:, -1], p[:, -1])
