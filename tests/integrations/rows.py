"""Four responses in padded rows, as other trainers have them, and our loss of their tokens."""

import torch
from torch import Tensor

from dppo_megatron.objectives import ObjectiveOutput, build_objective, sequence_weights

LENGTHS = torch.tensor([5, 9, 1, 7])
MASK = torch.arange(9) < LENGTHS[:, None]


def policies() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ln mu, ln p of the old policy, ln pi with a gradient, and the advantages, all [4, 9]."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mu = (-normal(4, 9).exp()).clamp(max=-1e-3)
    old = (mu + 0.1 * normal(4, 9)).clamp(max=-1e-3)
    pi = (old + 0.6 * normal(4, 9)).clamp(max=-1e-3).requires_grad_()
    return mu, old, pi, normal(4, 1).expand(4, 9)


def ours(
    name: str, kind: str, mu: Tensor, pi: Tensor, advantage: Tensor, old: Tensor | None = None, **overrides
) -> tuple[Tensor, Tensor, ObjectiveOutput]:
    """The loss with the weights of the aggregation `kind`, its gradient [4, 9], and the objective's output."""
    given = {"logprob": pi, "rollout_logprob": mu, "old_logprob": old, "advantage": advantage}
    flat = {name: value[MASK] for name, value in given.items() if value is not None}
    ids = torch.arange(4)[:, None].expand(4, 9)[MASK]
    out = build_objective(name, **overrides)(**flat, mask=torch.ones_like(ids, dtype=torch.bool), sequence_ids=ids)
    loss = (out.loss * sequence_weights(kind, LENGTHS, horizon=9).double()[ids]).sum()
    return loss, torch.autograd.grad(loss, pi)[0], out
