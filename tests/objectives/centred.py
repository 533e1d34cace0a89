"""Score centering as a dense formula over the vocabulary, and through the kernels on a shard of it."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dppo_megatron.objectives import TopKLogprobs, build_objective

# What is centred -> (preset, overrides, weight c(mu, pi, A) of a token).
WEIGHTS = {
    "alone": ("score_centering", {}, lambda mu, pi, a: torch.ones_like(mu)),
    "tis": ("score_centering_tis", {}, lambda mu, pi, a: (pi / mu).clamp(max=2.0)),
    "ipo": (
        "ipo_cap",
        {"delta": 0.05, "centering": "policy"},
        lambda mu, pi, a: torch.where((pi - mu).abs() > 0.05, 0.0, (pi / mu).clamp(max=1e4)),
    ),
    "dppo": (
        "dppo_binary_tv",
        {"delta": 0.05, "centering": "policy"},
        lambda mu, pi, a: torch.where(((pi - mu).abs() > 0.05) & (a * (pi - mu) > 0), 0.0, pi / mu),
    ),
    "icepop": (
        "pg_is",
        {"mismatch": "mask", "mismatch_low": 0.5, "mismatch_high": 2.0, "centering": "policy"},
        lambda mu, pi, a: torch.where((pi / mu < 0.5) | (pi / mu > 2.0), 0.0, pi / mu),
    ),
}
TOKENS, VOCAB, PADDED, HIDDEN = 24, 40, 48, 16


@dataclass(frozen=True)
class Given:
    hidden: Tensor  # [T, H]
    weight: Tensor  # [PADDED, H]: rows from VOCAB on are padding
    mu: Tensor  # [T, V] ln mu
    sampled: Tensor
    advantage: Tensor
    ids: Tensor  # [T, K]

    @property
    def logits(self) -> Tensor:
        return self.hidden @ self.weight.T


def given(k: int, seed: int = 0, drift: float = 1.0) -> Given:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = normal(TOKENS, HIDDEN), 0.5 * normal(PADDED, HIDDEN)
    mu = ((hidden @ weight.T)[:, :VOCAB] + drift * normal(TOKENS, VOCAB)).log_softmax(-1)
    sampled = torch.multinomial(mu.exp(), 1, generator=generator).squeeze(1)
    return Given(hidden, weight, mu, sampled, normal(TOKENS), mu.topk(k, dim=1).indices)


def dense_gradient(g: Given, kind: str) -> Tensor:
    """d loss / d logits [T, V] in float64, by autograd through the whole vocabulary, mu's tail modelled.

    A token of the tail is weighed by its ratio and, where a mask asks for a mass, by the tail's mean.
    """
    weigh = WEIGHTS[kind][2]
    logits = g.logits[:, :VOCAB].clone().requires_grad_()
    ln_pi = logits.log_softmax(-1)
    pi, mu, a = ln_pi.detach().exp(), g.mu.exp(), g.advantage[:, None]
    head = torch.zeros_like(mu, dtype=torch.bool).scatter(1, g.ids, True)
    tail_pi, tail_mu = ((~head * p).sum(1, keepdim=True) for p in (pi, mu))
    expected = torch.where(head, mu * weigh(mu, pi, a), 0.0)
    if count := VOCAB - g.ids.shape[1]:
        expected = torch.where(head, expected, (tail_mu / tail_pi) * weigh(tail_mu / count, tail_pi / count, a) * pi)
    own = weigh(mu, pi, a).gather(1, g.sampled[:, None])
    score = own * ln_pi.gather(1, g.sampled[:, None]) - (expected * ln_pi).sum(1, keepdim=True)
    return torch.autograd.grad(-(a * score).sum(), logits)[0]


def gradient_through_kernels(
    g: Given, kind: str, dtype: torch.dtype, *, rank: int = 0, world: int = 1, fused: bool = False, **options: Any
) -> tuple[Tensor, dict[str, int]]:
    """(d loss / d this rank's logits, or hidden states where fused; collectives of forward and backward)."""
    from dppo_megatron.vocab_parallel import linear_token_statistics, token_statistics
    from tests.support.shards import CountCollectives

    rows = slice(rank * PADDED // world, (rank + 1) * PADDED // world)
    group = dist.group.WORLD if world > 1 else None
    head = {"target_ids": g.sampled, "topk_ids": g.ids, "vocab_size": VOCAB, "group": group, **options}
    forward, backward = CountCollectives(), CountCollectives()
    if fused:
        leaf = g.hidden.to(dtype).requires_grad_()
        with forward:
            stats = linear_token_statistics(leaf, g.weight[rows].to(dtype), **head)
    else:
        leaf = g.logits[:, rows].to(dtype).requires_grad_()
        with forward:
            stats = token_statistics(leaf, **head)
    name, overrides, _ = WEIGHTS[kind]
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    out = build_objective(name, **overrides)(
        logprob=stats.logprob,
        mask=torch.ones(TOKENS, dtype=torch.bool),
        rollout_logprob=g.mu.gather(1, g.sampled[:, None])[:, 0].to(exact),
        advantage=g.advantage.to(exact),
        topk=TopKLogprobs(
            g.ids, g.mu.gather(1, g.ids).to(exact), stats.topk_logprob, stats.other_logprob, g.sampled, VOCAB
        ),
    )
    with backward:
        out.loss.sum().backward()
    return leaf.grad, {"forward": forward.found.total(), "backward": backward.found.total()}
