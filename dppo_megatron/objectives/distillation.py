"""Compute the divergence from a teacher over its top K, the sampled token and the rest, with its gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .inputs import Buckets, Tokens
from .settings import ObjectiveSettings

if TYPE_CHECKING:
    from jaxtyping import Float


def effective_advantage(
    s: ObjectiveSettings, advantage: Tensor, policy: Tensor, teacher: Any, step: int
) -> Float[Tensor, " T"]:
    """Return the A [T] that loss, masks, metrics and the statistic of the batch read:

        A = advantage_weight A of rewards + weight ln(teacher / policy), the last term only for `sampled`

    policy: ln of the old policy at the sampled tokens if the method needs it, so that A is the same in all updates of a
    step; else of the policy in training. teacher: None unless `sampled`.
    """
    mixed_advantage = s.advantage_weight * advantage
    if s.distillation == "sampled":
        clip = s.distillation_clip or math.inf
        mixed_advantage = mixed_advantage - _weight(s, step) * (policy - teacher).clamp(-clip, clip)
    return mixed_advantage


def distill(
    s: ObjectiveSettings, tokens: Tokens, buckets: Buckets, step: int
) -> tuple[Float[Tensor, " T"], dict[str, Tensor]]:
    """Return the weighted divergence [T] with gradient, 0 for `sampled`, and values [T] to measure, by name.

    p = pi and t = teacher are taken over disjoint events v: the tokens of the teacher's list, the sampled token, and
    all others as one. Merging tokens never raises a divergence. So each divergence is a lower bound of the divergence
    over the vocabulary, and equals it if the list covers the vocabulary.

        forward_kl      sum t ln(t / p)                                    d D / d ln p = -t
        reverse_kl      sum p ln(p / t)                                                    p ln(p / t)
        jensen_shannon  b sum t ln(t / m) + (1 - b) sum p ln(p / m)                        (1 - b) p ln(p / m)
                        m = b t + (1 - b) p  (GKD, arXiv 2306.13649)

    The slopes omit multiples of p, which add nothing because sum p grad ln p = 0. If pi has no mass in the rest, for
    example because the list covers the sampling mask, the teacher is renormalised over the other events. A token with D
    above `distillation_clip` has its loss and gradient scaled by clip / D. A rest of the teacher below the rounding of
    1 - sum(t) counts as 0 in forward_kl and as that rounding elsewhere, so that no divergence is infinite.
    """
    kind, clip, b = s.distillation, s.distillation_clip or math.inf, s.jensen_shannon_weight
    gap = torch.where(tokens.mask, tokens.detached_logprob - buckets.anchor_logprob[:, -1], 0.0)
    rest = buckets.policy_other_logprob[:, None]
    present = torch.cat([buckets.present, tokens.mask[:, None] & rest.isfinite()], dim=1)
    ln_p = torch.where(present, torch.cat([buckets.policy_logprob, rest], dim=1), 0.0)
    with torch.no_grad():
        p = ln_p.exp() * present
        t = torch.cat([buckets.anchor, buckets.anchor_other[:, None]], dim=1) * present
        tiny = torch.finfo(t.dtype).tiny
        total = t.sum(dim=1, keepdim=True).clamp(min=tiny)
        ln_rest = buckets.anchor_other.clamp(min=tiny if kind == "forward_kl" else buckets.noise).log()
        ln_t = (torch.cat([buckets.anchor_logprob, ln_rest[:, None]], dim=1) - total.log()) * present
        t = t / total
        if kind == "forward_kl":
            slope, terms = -t, t * (ln_t - ln_p)
        elif kind == "jensen_shannon":
            ln_m = torch.logaddexp(ln_t + math.log(b), ln_p + math.log(1 - b))
            slope = (1 - b) * p * (ln_p - ln_m)
            terms = slope + b * t * (ln_t - ln_m)
        else:
            slope = terms = p * (ln_p - ln_t)
        divergence = terms.sum(dim=1).clamp(min=0.0)
        scale = _weight(s, step) * (
            clip / divergence.clamp(min=clip) if clip < math.inf else torch.ones_like(divergence)
        )
    metric_values = {
        "divergence": divergence,
        "sampled_kl": gap,
        "tail_mass_teacher": t[:, -1],
        "tail_mass_policy": p[:, -1],
    }
    if kind == "sampled":
        return tokens.zeros, metric_values
    return scale * (divergence + (slope * (ln_p - ln_p.detach())).sum(dim=1)), metric_values


def _weight(s: ObjectiveSettings, step: int) -> float:
    done = 0.0 if s.distillation_steps is None else min(1.0, step / s.distillation_steps)
    return (1 - done) * s.distillation_coefficient + done * (s.distillation_end or 0.0)
