"""Small policies over a whole vocabulary, and the arguments of an objective for them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dppo_megatron.objectives import TopKLogprobs, build_objective


@dataclass(frozen=True)
class Case:
    """`call` is the keyword arguments of an objective; gradients reach `logits` [T, V]."""

    logits: Tensor
    call: dict[str, Any]

    @property
    def topk(self) -> TopKLogprobs:
        return self.call["topk"]


def each_tensor(topk: TopKLogprobs, change: Callable[[Tensor], Tensor]) -> TopKLogprobs:
    tensors = {name: value for name, value in vars(topk).items() if torch.is_tensor(value)}
    return replace(topk, **{name: change(value) for name, value in tensors.items()})


def gather(logprobs: Tensor, ids: Tensor) -> Tensor:
    return logprobs.gather(1, ids[:, None]).squeeze(1)


def make_case(
    mu_logprobs: Tensor,
    logits: Tensor,
    sampled: Tensor,
    advantage: Tensor,
    k: int,
    *,
    dtype: torch.dtype = torch.float64,
    mask: Tensor | None = None,
) -> Case:
    """mu_logprobs [T, V]: exact; logits [T, V]: of pi; sampled, advantage [T]; k: size of the top K."""
    logits = logits.detach().to(dtype).requires_grad_()
    logprobs = logits.log_softmax(-1)
    ids = mu_logprobs.topk(k, dim=1).indices
    in_s = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    in_s = in_s.scatter(1, sampled[:, None], True)
    topk = TopKLogprobs(
        ids=ids,
        rollout_logprob=mu_logprobs.gather(1, ids).to(dtype),
        logprob=logprobs.gather(1, ids),
        other_logprob=logprobs.detach().masked_fill(in_s, -torch.inf).logsumexp(1),
        target_ids=sampled,
        vocab_size=logits.shape[1],
    )
    rollout = gather(mu_logprobs, sampled).to(dtype)
    call = {
        "logprob": gather(logprobs, sampled),
        "rollout_logprob": rollout,
        "advantage": advantage.to(dtype),
        "mask": torch.ones_like(sampled, dtype=torch.bool) if mask is None else mask,
        "topk": topk,
        "old_logprob": rollout.clone(),
        "sequence_ids": torch.arange(len(sampled)),
    }
    return Case(logits, call)


def random_case(
    seed: int,
    tokens: int = 8,
    vocab: int = 12,
    k: int = 4,
    *,
    drift: float = 1.0,
    dtype: torch.dtype = torch.float64,
    on_policy: bool = False,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mu_logits = 2 * normal(tokens, vocab)
    logits = mu_logits if on_policy else mu_logits + drift * normal(tokens, vocab)
    mu = mu_logits.log_softmax(-1)
    sampled = torch.multinomial(mu.exp(), 1, generator=generator).squeeze(1)
    advantage = normal(tokens)
    advantage[::5] = 0.0
    return make_case(mu, logits, sampled, advantage, k, dtype=dtype)


def run(name: str, case: Case, **overrides):
    return build_objective(name, **overrides)(**case.call)


def gradient(name: str, case: Case, **overrides) -> torch.Tensor:
    loss = run(name, case, **overrides).loss.sum()
    return torch.autograd.grad(loss, case.logits, retain_graph=True)[0]
