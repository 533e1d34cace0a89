"""Computes the gated delta rule and its causal convolution for packed sequences, with plain torch operators.

A head has a state S [dk, dv], 0 at the start of a sequence. For each row with query q, key k, value v, decay a (the
logarithm, at most 0) and step size b (https://arxiv.org/abs/2412.06464):

    S = exp(a) S,    S = S + k b (v - S^T k)^T,    output S^T q

Each sequence is processed in chunks of rows. All chunks are prepared at once. Then step i computes the state after the
i-th chunk, for all sequences that have an i-th chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dppo_megatron.train.actor.batch.chunks import ChunkPlan

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def causal_convolution(
    x: Float[Tensor, "T c"], weight: Float[Tensor, "c 1 k"], columns: Int[Tensor, "T 1"]
) -> Float[Tensor, "T c"]:
    """Multiply the last k rows of each channel by `weight` and sum them, without rows of an earlier sequence."""
    taps = weight.squeeze(1).unbind(-1)
    out = x * taps[-1]
    for back, tap in enumerate(reversed(taps[:-1]), start=1):
        earlier = F.pad(x, (0, 0, back, 0))[: len(x)]
        out = out + torch.where(columns >= back, earlier, 0.0) * tap
    return out


def gated_delta_rule(
    query: Float[Tensor, "T g dk"],
    key: Float[Tensor, "T g dk"],
    value: Float[Tensor, "T h dv"],
    decay: Float[Tensor, "T h"],
    beta: Float[Tensor, "T h"],
    plan: ChunkPlan,
) -> Float[Tensor, "T h dv"]:
    """Return the outputs in fp32. h / g value heads share a head of queries and keys. No collectives.

    Queries and keys are first normalized to length 1, and queries divided by sqrt(dk).
    """
    size = len(plan.rows) // sum(plan.steps)
    shared = value.shape[1] // query.shape[1]

    def chunked(x: Tensor) -> Tensor:  # [chunks, heads, size, ...]
        padded = F.pad(x.float(), (0, 0) * (x.dim() - 1) + (0, 1)).index_select(0, plan.rows)
        return padded.view(-1, size, *x.shape[1:]).transpose(1, 2)

    q, k = (chunked(_unit(x)).repeat_interleave(shared, dim=1) for x in (query, key))
    v, total, step_size = chunked(value), chunked(decay).cumsum(-1), chunked(beta)[..., None]
    q = q * query.shape[-1] ** -0.5
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    fading = total.exp()[..., None]
    # Rows of a chunk correct each other: (1 + system) x = b [v, exp(a) k]; `system` is strictly lower triangular.
    stepped = k * step_size
    system, right = (stepped @ k.mT) * between, torch.cat((v * step_size, stepped * fading), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, read_keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    inside, q = (q @ k.mT) * between, q * fading
    last = total[..., -1:]
    k, fading = (k * (last - total).exp()[..., None]).mT, last.exp()[..., None]
    out, at = [], 0
    state = q.new_zeros(plan.steps[0], q.shape[1], q.shape[-1], v.shape[-1])
    for count in plan.steps:
        chunks, state = slice(at, at + count), state[:count]
        added = new[chunks] - read_keys[chunks] @ state
        out.append(q[chunks] @ state + inside[chunks] @ added)
        state = state * fading[chunks] + k[chunks] @ added
        at += count
    return torch.cat(out).transpose(1, 2).flatten(0, 1).index_select(0, plan.places)


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
