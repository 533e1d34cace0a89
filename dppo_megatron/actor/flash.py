"""Computes attention for packed sequences by torch's FlashAttention on a GPU, without padding, mask or stored scores.

In a causal call, a row sees the rows of its segment up to itself. In a second call, without a mask, it sees all rows
that the segment continues: a shared prompt, or with context parallelism the earlier chunks of the sequence. The outputs
are merged by their log-sum-exps. The backward pass gives the merged output O and log-sum-exp L to both calls, so that
each recomputes a part of the softmax: P = exp(S - L), dS = P (dP - sum(dO O)) (https://arxiv.org/abs/2307.08691,
algorithm 2). `torch.nn.attention.varlen` uses the same operators, but its backward pass ignores the log-sum-exp
gradient.
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

# Arguments of both operators: int32 query bounds and key bounds, most queries and keys in a segment, dropout, causal.
Call = tuple[Tensor, Tensor, int, int, float, bool]


@dataclass(frozen=True)
class FlashPlan:
    """Plans the calls for a micro-batch once for all layers.

    Example: a prompt of 3 rows, then two samples of 2 rows and 1 row. `segments` has the bounds [0, 3, 5, 6], `rows` is
    [3, 4, 5], `keys` is [0, 1, 2], and `prefixes` has a single segment of 3 queries and 3 keys.
    """

    segments: Call
    prefixes: Call | None = None  # if None, `rows` and `keys` are None too: no segment continues another
    rows: Int[Tensor, " n"] | None = None  # queries of `prefixes`
    keys: Int[Tensor, " m"] | None = None  # keys of `prefixes`: rows here, or of all context-parallel ranks end to end


def can_use_flash(dtype: torch.dtype, head_size: int, device: torch.device) -> bool:
    """Return whether FlashAttention works forward and backward: 16 bits, sizes up to 256, multiples of 8."""
    x = torch.empty(1, 1, 8, head_size, dtype=dtype, device=device, requires_grad=True)
    return can_use_flash_attention(SDPAParams(x, x, x, None, 0.0, True, False))


def plan_flash(
    bounds: Tensor, prefixes: Tensor | None, context_rank: int, context_size: int, device: torch.device
) -> FlashPlan:
    """Plan the calls for the segments between `bounds`; `segments.plan_segments` describes the arguments."""
    bounds = bounds.long()
    lengths = bounds.diff()
    if context_size > 1:  # this rank's two chunks of each sequence, see `batch.context`
        chunks, size = torch.tensor([context_rank, 2 * context_size - 1 - context_rank]), lengths // (2 * context_size)
        prefixes = torch.stack((bounds[:-1].repeat_interleave(2), (size[:, None] * chunks).flatten()), dim=1)
        lengths = size.repeat_interleave(2)
    own_call = _call(lengths, lengths, True, device)
    if prefixes is None or not bool(prefixes[:, 1].any()):
        return FlashPlan(own_call)
    continues = prefixes[:, 1] > 0
    continued, group = prefixes[continues].unique_consecutive(dim=0, return_inverse=True)  # samples of one prompt
    first, counts = continued.long().unbind(dim=1)
    queries = torch.zeros_like(counts).index_add_(0, group, lengths[continues])
    rows = continues.repeat_interleave(lengths).nonzero().flatten()
    keys = torch.arange(int(counts.sum())) + (first - counts.cumsum(0) + counts).repeat_interleave(counts)
    keys = keys if context_size == 1 else gathered_places(bounds, context_size)[keys]
    return FlashPlan(own_call, _call(queries, counts, False, device), rows.to(device), keys.to(device))


def _call(queries: Int[Tensor, " S"], keys: Int[Tensor, " S"], causal: bool, device: torch.device) -> Call:
    query_bounds, key_bounds = (F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32) for lengths in (queries, keys))
    return query_bounds, key_bounds, int(queries.max()), int(keys.max()), 0.0, causal


class FlashAttention(torch.autograd.Function):
    """Attends from query to key and value, and to the rows of `keys` and `values` that `plan.keys` selects.

    query and the result are [T h d], key and value [T g d].
    """

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
        out, sums, *_ = attend(query, key, value, *plan.segments, False, scale=scale)  # sums [h T], fp32
        if plan.prefixes is not None and plan.rows is not None and plan.keys is not None:
            rows, continued = plan.rows, [x.index_select(0, plan.keys) for x in (keys, values)]
            prefix_out, prefix_sums, *_ = attend(
                query.index_select(0, rows), *continued, *plan.prefixes, False, scale=scale
            )
            own_sums = sums.index_select(1, rows)
            merged_sums = torch.logaddexp(own_sums, prefix_sums)
            share, prefix_share = ((x - merged_sums).exp().T[..., None] for x in (own_sums, prefix_sums))
            out.index_copy_(0, rows, (out.index_select(0, rows) * share + prefix_out * prefix_share).to(out.dtype))
            sums.index_copy_(1, rows, merged_sums)
        ctx.save_for_backward(query, key, value, out, sums, keys, values)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *own_inputs, keys, values = ctx.saved_tensors
        plan, rows, differentiate = ctx.plan, ctx.plan.rows, torch.ops.aten._flash_attention_backward
        seeds = grad.new_zeros(2, dtype=torch.uint64), grad.new_empty(0)  # unused, because there is no dropout
        dq, *own_grads = differentiate(grad, *own_inputs, *plan.segments, *seeds, scale=ctx.scale)
        if rows is None:
            return dq, *own_grads, None, None, None, None
        continued = (x.index_select(0, plan.keys) for x in (keys, values))
        row_grad, query, out = (x.index_select(0, rows) for x in (grad, own_inputs[0], own_inputs[3]))
        prefix_inputs = (row_grad, query, *continued, out, own_inputs[4].index_select(1, rows))
        prefix_dq, *prefix_grads = differentiate(*prefix_inputs, *plan.prefixes, *seeds, scale=ctx.scale)
        scattered_grads = (
            torch.zeros_like(x).index_add_(0, plan.keys, y) for x, y in zip((keys, values), prefix_grads, strict=True)
        )
        return dq.index_add_(0, rows, prefix_dq), *own_grads, *scattered_grads, None, None
