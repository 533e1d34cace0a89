"""Compute the divergence from a teacher over the teacher's top K, the sampled token and the rest, with gradient."""

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
    """Return the A [T] that loss, masks, metrics and the batch statistic use:

        A = advantage_weight A_reward + weight ln(teacher / policy), the last term only for `sampled`

    policy: the sampled tokens' log-probs under the old policy if the method needs them, so that A stays constant in all
        updates of a step; otherwise under the policy in training.
    teacher: the teacher's log-probs, used only for `sampled`.
    """
    mixed_advantage = s.advantage_weight * advantage
    if s.distillation == "sampled":
        clip = s.distillation_clip or math.inf
        mixed_advantage = mixed_advantage - _weight(s, step) * (policy - teacher).clamp(-clip, clip)
    return mixed_advantage


def distill(
    s: ObjectiveSettings, tokens: Tokens, buckets: Buckets, step: int
) -> tuple[Float[Tensor, " T"], dict[str, Tensor]]:
    """Return the weighted divergence [T] with gradient (0 for `sampled`), and metric values [T] by name.

    p = pi and t = teacher are taken over disjoint events v: each token in the teacher's list, the sampled token, and
    all other tokens together. Merging tokens never raises a divergence. So each divergence is a lower bound of the full
    divergence, and equals it if the list covers the vocabulary.

        forward_kl      sum t ln(t / p)                                    d D / d ln p = -t
        reverse_kl      sum p ln(p / t)                                                    p ln(p / t)
        jensen_shannon  b sum t ln(t / m) + (1 - b) sum p ln(p / m)                        (1 - b) p ln(p / m)
                        m = b t + (1 - b) p  (GKD, arXiv 2306.13649)

    The slopes omit multiples of p, which add nothing because sum p grad ln p = 0. If pi has no mass in the rest, for
    example because the list covers the sampling mask, the teacher is renormalized over the other events. Where D is
    above `distillation_clip`, loss and gradient are scaled by clip / D. A teacher's rest below the rounding of 1 -
    sum(t) counts as 0 in forward_kl and as that rounding elsewhere, so that no divergence is infinite.
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
