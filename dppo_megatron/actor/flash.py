"""Computes attention of packed sequences by torch's FlashAttention on a GPU, without padding, mask or stored scores.

A row sees its own segment up to itself (one causal call) and all rows that its segment continues (one call without a
mask): a shared prompt, or with context parallelism the earlier chunks of its sequence. The outputs are merged by their
log-sum-exps. The backward pass gives the merged output O and log-sum-exp L to both calls, so that each recomputes its
part of the softmax: P = exp(S - L), dS = P (dP - sum(dO O)) (https://arxiv.org/abs/2307.08691, algorithm 2). The
operators are those of `torch.nn.attention.varlen`. The backward pass of that module ignores the gradient of the
log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from dppo_megatron.actor.batch.context import gathered_places

if TYPE_CHECKING:
    from jaxtyping import Int

# Arguments of both operators: int32 bounds of queries and keys of each segment, longest of both, dropout, causal.
Call = tuple[Tensor, Tensor, int, int, float, bool]


@dataclass(frozen=True)
class FlashPlan:
    """Plans the calls for one micro-batch once for all layers.

    Example: a prompt of 3 rows, then its samples of 2 rows and 1: `own` has bounds [0, 3, 5, 6], rows [3, 4, 5], keys
    [0, 1, 2], and `before` one segment of 3 queries and 3 keys.
    """

    own: Call
    before: Call | None = None  # if None, `rows` and `keys` are None too: no segment continues another
    rows: Int[Tensor, " n"] | None = None  # queries of `before`
    keys: Int[Tensor, " m"] | None = None  # keys of `before`: rows here, or of all context-parallel ranks end to end


def can_use_flash(dtype: torch.dtype, head_size: int, device: torch.device) -> bool:
    """Return whether FlashAttention works forward and backward: 16 bits, sizes up to 256, multiples of 8."""
    x = torch.empty(1, 1, 8, head_size, dtype=dtype, device=device, requires_grad=True)
    return can_use_flash_attention(SDPAParams(x, x, x, None, 0.0, True, False))


def plan_flash(
    bounds: Tensor, prefixes: Tensor | None, context_rank: int, context_size: int, device: torch.device
) -> FlashPlan:
    """Plan the calls for the segments bounded by `bounds`; `segments.plan_segments` describes the arguments."""
    bounds = bounds.long()
    lengths = bounds.diff()
    if context_size > 1:  # this rank's two chunks of each sequence, see `batch.context`
        chunks, size = torch.tensor([context_rank, 2 * context_size - 1 - context_rank]), lengths // (2 * context_size)
        prefixes = torch.stack((bounds[:-1].repeat_interleave(2), (size[:, None] * chunks).flatten()), dim=1)
        lengths = size.repeat_interleave(2)
    own = _call(lengths, lengths, True, device)
    if prefixes is None or not bool(prefixes[:, 1].any()):
        return FlashPlan(own)
    continues = prefixes[:, 1] > 0
    continued, group = prefixes[continues].unique_consecutive(dim=0, return_inverse=True)  # samples of one prompt
    first, counts = continued.long().unbind(dim=1)
    queries = torch.zeros_like(counts).index_add_(0, group, lengths[continues])
    rows = continues.repeat_interleave(lengths).nonzero().flatten()
    keys = torch.arange(int(counts.sum())) + (first - counts.cumsum(0) + counts).repeat_interleave(counts)
    keys = keys if context_size == 1 else gathered_places(bounds, context_size)[keys]
    return FlashPlan(own, _call(queries, counts, False, device), rows.to(device), keys.to(device))


def _call(queries: Int[Tensor, " S"], keys: Int[Tensor, " S"], causal: bool, device: torch.device) -> Call:
    of_queries, of_keys = (F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32) for lengths in (queries, keys))
    return of_queries, of_keys, int(queries.max()), int(keys.max()), 0.0, causal


class FlashAttention(torch.autograd.Function):
    """Return [T h d] of query [T h d], key and value [T g d], and the keys and values that `plan.keys` selects from."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: FlashPlan,
        scale: float | None,
    ) -> Tensor:
        attend = torch.ops.aten._flash_attention_forward
        out, sums, *_ = attend(query, key, value, *plan.own, False, scale=scale)  # sums [h T], fp32
        if plan.before is not None and plan.rows is not None and plan.keys is not None:
            rows, continued = plan.rows, [x.index_select(0, plan.keys) for x in (keys, values)]
            more, more_sums, *_ = attend(query.index_select(0, rows), *continued, *plan.before, False, scale=scale)
            own_sums = sums.index_select(1, rows)
            both = torch.logaddexp(own_sums, more_sums)
            share, more_share = ((x - both).exp().T[..., None] for x in (own_sums, more_sums))
            out.index_copy_(0, rows, (out.index_select(0, rows) * share + more * more_share).to(out.dtype))
            sums.index_copy_(1, rows, both)
        ctx.save_for_backward(query, key, value, out, sums, keys, values)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *own, keys, values = ctx.saved_tensors
        plan, rows, differentiate = ctx.plan, ctx.plan.rows, torch.ops.aten._flash_attention_backward
        seeds = grad.new_zeros(2, dtype=torch.uint64), grad.new_empty(0)  # unused, because there is no dropout
        dq, *of_own = differentiate(grad, *own, *plan.own, *seeds, scale=ctx.scale)
        if rows is None:
            return dq, *of_own, None, None, None, None
        continued = (x.index_select(0, plan.keys) for x in (keys, values))
        some, query, out = (x.index_select(0, rows) for x in (grad, own[0], own[3]))
        inputs = (some, query, *continued, out, own[4].index_select(1, rows))
        more, *parts = differentiate(*inputs, *plan.before, *seeds, scale=ctx.scale)
        of_all = (torch.zeros_like(x).index_add_(0, plan.keys, y) for x, y in zip((keys, values), parts, strict=True))
        return dq.index_add_(0, rows, more), *of_own, *of_all, None, None
