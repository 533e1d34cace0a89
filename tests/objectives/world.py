"""Random tokens of several responses, on which written losses and the library are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dppo_megatron.objectives import TopKLogprobs

LENGTHS = (7, 1, 5, 9, 3, 12)
VOCAB, K = 15, 5


@dataclass(frozen=True)
class World:
    """Tokens of several responses, packed, some of them without loss. The log-probs of pi are leaves."""

    ln_pi: Tensor  # [T] leaf
    listed_ln_pi: Tensor  # [T, K] leaf
    ln_mu: Tensor
    ln_old: Tensor
    listed_ln_mu: Tensor
    other_ln_pi: Tensor
    ids: Tensor
    sampled: Tensor
    advantage: Tensor
    mask: Tensor
    sequence: Tensor

    @property
    def call(self) -> dict[str, Any]:
        return {
            "logprob": self.ln_pi,
            "rollout_logprob": self.ln_mu,
            "old_logprob": self.ln_old,
            "advantage": self.advantage,
            "mask": self.mask,
            "sequence_ids": self.sequence,
            "topk": TopKLogprobs(self.ids, self.listed_ln_mu, self.listed_ln_pi, self.other_ln_pi, self.sampled, VOCAB),
        }

    def double(self) -> World:
        """The same numbers in float64, with leaves of their own."""
        ln_pi, listed = (x.detach().double().requires_grad_() for x in (self.ln_pi, self.listed_ln_pi))
        rest = {
            name: getattr(self, name).double()
            for name in ("ln_mu", "ln_old", "listed_ln_mu", "other_ln_pi", "advantage")
        }
        return World(ln_pi, listed, **rest, ids=self.ids, sampled=self.sampled, mask=self.mask, sequence=self.sequence)

    @property
    def responses(self) -> list[Tensor]:
        """Indices of the tokens with loss, of each response that has any."""
        found = [torch.nonzero((self.sequence == i) & self.mask).flatten() for i in range(len(LENGTHS))]
        return [tokens for tokens in found if len(tokens)]

    @property
    def ratio(self) -> Tensor:
        return (self.ln_pi - self.ln_mu).exp()


def world(seed: int, dtype: torch.dtype) -> World:
    """Draw ratios near and far from 1, mu near 0 and near 1, responses with A = 0, and rubbish as padding."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sequence = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])
    tokens = len(sequence)
    sharpness = torch.tensor([0.5, 2.0, 6.0], dtype=torch.float64)[torch.arange(tokens) % 3]
    mu_logits = sharpness[:, None] * normal(tokens, VOCAB)
    drift = torch.tensor([0.02, 0.1, 0.5, 1.5], dtype=torch.float64)[(sequence + seed) % 4]
    ln_mu, ln_pi = mu_logits.log_softmax(-1), (mu_logits + drift[:, None] * normal(tokens, VOCAB)).log_softmax(-1)
    sampled = torch.multinomial(ln_mu.exp(), 1, generator=generator).squeeze(1)
    advantage = normal(len(LENGTHS))[sequence]
    advantage = torch.where(sequence == seed % len(LENGTHS), 0.0, advantage)
    mask = torch.rand(tokens, generator=generator) > 0.15
    ids = ln_mu.topk(K, dim=1).indices
    ids[::4, -1] = -1  # an engine may list fewer
    present = ids >= 0
    of_sampled = sampled[:, None]
    inside = torch.zeros(tokens, VOCAB, dtype=torch.bool)
    inside = inside.scatter(1, torch.where(present, ids, of_sampled), True).scatter(1, of_sampled, True)
    other = ln_pi.masked_fill(inside, -torch.inf).logsumexp(1)

    def rubbish(value: Tensor) -> Tensor:
        keep = mask if value.ndim == 1 else mask[:, None] & present
        return torch.where(keep, value, torch.nan).to(dtype)

    return World(
        ln_pi=rubbish(ln_pi.gather(1, of_sampled).squeeze(1)).requires_grad_(),
        listed_ln_pi=rubbish(ln_pi.gather(1, ids.clamp(min=0))).requires_grad_(),
        ln_mu=rubbish(ln_mu.gather(1, of_sampled).squeeze(1)),
        ln_old=rubbish(ln_mu.gather(1, of_sampled).squeeze(1) + 0.3 * normal(tokens)),
        listed_ln_mu=rubbish(ln_mu.gather(1, ids.clamp(min=0))),
        other_ln_pi=rubbish(other),
        ids=ids,
        sampled=sampled,
        advantage=advantage.to(dtype),
        mask=mask,
        sequence=sequence,
    )
