"""Computes attention for packed sequences by torch's FlashAttention on a GPU, without padding, mask or stored scores.

In a causal call, a row sees the rows of its segment up to itself. In a second call, without a mask, it sees all rows
that the segment continues: a shared prompt, or with context parallelism the earlier chunks of the sequence. The outputs
are merged by their log-sum-exps. The backward pass gives the merged output O and log-sum-exp L to both calls, so that
each recomputes a part of the softmax: P = exp(S - L), dS = P (dP - sum(dO O)) (https://arxiv.org/abs/2307.08691,
algorithm 2). `torch.nn.attention.varlen` uses the same operators, but its backward pass ignores the log-sum-exp
gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dppo_megatron.train.actor.batch.flash import FlashPlan


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
