"""Computes divergences from a teacher by plain formulas over the whole vocabulary."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dppo_megatron.objectives import ObjectiveSettings


def dense_loss(s: ObjectiveSettings, g: dict[str, Any], logits: Tensor) -> Tensor:
    """Return the loss [T] of `s`'s divergence as the documentation defines it, by a softmax over the sampling mask.

    - g: inside [T, V] sampling masks, teacher [T, V] ln t, ids [T, K] the teacher's list, target [T], mask [T]
    - logits: [T, V]
    """
    ln_pi = logits.masked_fill(~g["inside"], -1e30).log_softmax(1)
    number, k = _events(g["ids"], g["target"], logits.shape[1]), g["ids"].shape[1]
    p, t = _masses(ln_pi.exp() * g["inside"], number, k), _masses(g["teacher"].exp(), number, k)
    used = p > 0  # an event that cannot happen is left out
    t = t * used / (t * used).sum(1, keepdim=True)
    p, t = torch.where(used, p, 1.0), torch.where(used, t, 1.0)
    ln_p, ln_t = p.log(), t.log()
    p, t = p * used, t * used
    b = s.jensen_shannon_weight
    m = torch.where(used, b * t + (1 - b) * p, 1.0)
    gap = (ln_pi - g["teacher"]).gather(1, g["target"][:, None])[:, 0]
    divergence = {
        "forward_kl": lambda: (t * (ln_t - ln_p)).sum(1),
        "reverse_kl": lambda: (p * (ln_p - ln_t)).sum(1),
        "jensen_shannon": lambda: (b * t * (ln_t - m.log()) + (1 - b) * p * (ln_p - m.log())).sum(1),
        "sampled": lambda: gap,
    }[s.distillation]()
    clip = s.distillation_clip or math.inf
    if s.distillation == "sampled":
        taught = gap.detach().clamp(-clip, clip) * ln_pi.gather(1, g["target"][:, None])[:, 0]
    else:
        taught = divergence * (clip / divergence.detach()).clamp(max=1.0)
    return torch.where(g["mask"], s.distillation_coefficient * taught, 0.0)


def _events(ids: Tensor, target: Tensor, vocab_size: int) -> Tensor:
    """Return each token's event [T, V]: the position in the list, K for the sampled token, K + 1 for the rest."""
    k = ids.shape[1]
    number = torch.full((len(ids), vocab_size), k + 1)
    for column in range(k):
        listed = one_hot(ids[:, column].clamp(min=0).long(), vocab_size).bool() & (ids[:, column] >= 0)[:, None]
        number = torch.where(listed, column, number)
    return torch.where(one_hot(target, vocab_size).bool(), k, number)


def _masses(probabilities: Tensor, number: Tensor, k: int) -> Tensor:
    return torch.zeros(len(number), k + 2, dtype=probabilities.dtype).scatter_add(1, number, probabilities)
