"""Core attention for packed sequences (THD) from plain torch operators, for the local layer spec.

Megatron's own local attention refuses packed sequences. Here sequences of similar length are padded side by
side and given to one causal SDPA per length group: the padding lies behind every real token of its row, so
causality alone keeps it out and the result is that of each sequence by itself. Which rows go where is
computed once per micro-batch (`PackedSequences`), not once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from .rope import rotate

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_SHORT = 32  # sequences up to here share one group: padding them costs less than another call
_FILL = 0.7  # a longer group admits sequences of at least this share of its longest


@dataclass(frozen=True)
class SegmentPlan:
    """Where each packed row lies in the padded layout, and back.

    `groups` are (sequences n, padded length L) in order; together they have N = sum(n L) padded rows.
    """

    groups: tuple[tuple[int, int], ...]
    pad_rows: Int[Tensor, " N"]  # packed row at each padded place; behind its end a sequence repeats its last
    packed_rows: Int[Tensor, " T"]  # padded place of each packed row


def plan_segments(cu_seqlens: Int[Tensor, " B+1"]) -> SegmentPlan:
    """Group the sequences bounded by `cu_seqlens` (on the CPU, first 0, last T) by length."""
    starts = cu_seqlens[:-1].long()
    lengths = cu_seqlens.long().diff()
    if bool((lengths <= 0).any()):
        raise ValueError("packed sequences must not be empty")
    lengths, order = torch.sort(lengths, descending=True, stable=True)
    starts = starts[order]
    groups, pad_rows = [], []
    packed_rows = torch.empty(int(lengths.sum()), dtype=torch.long)
    first, places = 0, 0
    while first < len(lengths):
        longest = int(lengths[first])
        admitted = 1 if longest <= _SHORT else max(1, int(longest * _FILL))
        n = int((lengths[first:] >= admitted).sum())
        start, length = starts[first : first + n, None], lengths[first : first + n, None]
        column = torch.arange(longest)[None]
        rows = start + torch.minimum(column, length - 1)
        real = column < length
        pad_rows.append(rows.flatten())
        place = places + torch.arange(n * longest).view(n, longest)
        packed_rows[rows[real]] = place[real]
        groups.append((n, longest))
        first, places = first + n, places + n * longest
    return SegmentPlan(tuple(groups), torch.cat(pad_rows), packed_rows)


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence, rotary embedding included; a `core_attention` for layer specs.

    Heads are those of this tensor-parallel rank. No collectives, no dropout.
    """

    def __init__(self, config, layer_number, attn_mask_type=None, attention_type="self", **kwargs):
        super().__init__(config=config)
        self.scale = kwargs.get("softmax_scale")

    def forward(
        self,
        query: Float[Tensor, "T h d"],
        key: Float[Tensor, "T g d"],
        value: Float[Tensor, "T g d"],
        attention_mask: None = None,
        *,
        packed_seq_params,
        **kwargs,
    ) -> Float[Tensor, "T hd"]:
        """h query heads share g key and value heads. `packed_seq_params` is a `PackedSequences`."""
        packed = packed_seq_params
        if packed.rope is not None:
            query = rotate(query, *packed.rope)
            key = rotate(key, *packed.rope)
        plan = packed.plan
        query, key, value = (_Pad.apply(x, plan.pad_rows, plan.packed_rows) for x in (query, key, value))
        out, place = [], 0
        for n, length in plan.groups:
            rows = slice(place, place + n * length)
            q, k, v = (x[rows].view(n, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            out.append(o.transpose(1, 2).reshape(n * length, -1))
            place += n * length
        padded = out[0] if len(out) == 1 else torch.cat(out)
        return _Unpad.apply(padded, plan.packed_rows)


class _Pad(torch.autograd.Function):
    """[T, ...] -> [N, ...]. Padding receives no gradient (no real query sees it), so the backward is a gather."""

    @staticmethod
    def forward(ctx, x, pad_rows, packed_rows):
        ctx.save_for_backward(packed_rows)
        return x.index_select(0, pad_rows)

    @staticmethod
    def backward(ctx, grad):
        (packed_rows,) = ctx.saved_tensors
        return grad.index_select(0, packed_rows), None, None


class _Unpad(torch.autograd.Function):
    """[N, ...] -> [T, ...]."""

    @staticmethod
    def forward(ctx, x, packed_rows):
        ctx.save_for_backward(packed_rows)
        ctx.places = x.shape[0]
        return x.index_select(0, packed_rows)

    @staticmethod
    def backward(ctx, grad):
        (packed_rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.places, *grad.shape[1:]).index_copy_(0, packed_rows, grad), None
