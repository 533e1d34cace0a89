"""Core attention for packed sequences (THD) from plain torch operators, for the local layer spec.

Megatron's own local attention refuses packed sequences. Here sequences of similar length are padded side by
side and given to one causal SDPA per length group: the padding lies behind every real token of its row, so
causality alone keeps it out and the result is that of each sequence by itself. Which rows go where is
computed once per micro-batch (`PackedSequences`), not once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from dppo_megatron.actor.batch.context import gather_rows, gathered_places, rows_of_rank

from .rope import rotate

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

_SHORT = 32  # sequences up to here share one group: padding them costs less than another call
_FILL = 0.7  # a longer group admits sequences of at least this share of its longest


@dataclass(frozen=True)
class SegmentPlan:
    """Where each packed row lies in the padded layout, and back.

    `groups` are (sequences n, padded queries Q, padded keys L) in order; together they have N = sum(n Q) padded
    rows. Q = L, and keys lie where queries do, unless context-parallel ranks share each sequence: then `keys`
    holds where they lie among the gathered ones.
    """

    groups: tuple[tuple[int, int, int], ...]
    pad_rows: Int[Tensor, " N"]  # packed row at each padded place; behind its end a sequence repeats its last
    packed_rows: Int[Tensor, " T"]  # padded place of each packed row
    keys: GatheredKeys | None = None

    def to(self, device: torch.device) -> SegmentPlan:
        keys = None if self.keys is None else self.keys.to(device)
        return replace(self, pad_rows=self.pad_rows.to(device), packed_rows=self.packed_rows.to(device), keys=keys)


@dataclass(frozen=True)
class GatheredKeys:
    """Keys and values of all context-parallel ranks: M gathered rows of which M' padded ones are made."""

    pad_rows: Int[Tensor, " M'"]  # gathered row at each padded place
    packed_rows: Int[Tensor, " M"]  # padded place of each gathered row
    positions: Int[Tensor, " N"]  # position in its sequence of each padded query: it sees the keys up to there

    def to(self, device: torch.device) -> GatheredKeys:
        return GatheredKeys(self.pad_rows.to(device), self.packed_rows.to(device), self.positions.to(device))


def plan_segments(cu_seqlens: Int[Tensor, " B+1"], context_rank: int = 0, context_size: int = 1) -> SegmentPlan:
    """Group the sequences bounded by `cu_seqlens` (on the CPU, first 0, last T) by length.

    With context parallelism they are the whole sequences, of which this rank holds `context.rows_of_rank`.
    """
    starts = cu_seqlens[:-1].long()
    lengths = cu_seqlens.long().diff()
    if bool((lengths <= 0).any()):
        raise ValueError("packed sequences must not be empty")
    lengths, order = torch.sort(lengths, descending=True, stable=True)
    counts = _group_sizes(lengths)
    key_rows, key_places = _side_by_side(starts[order], lengths, counts)
    longest = lengths[torch.tensor([0, *counts[:-1]]).cumsum(0)].tolist()
    groups = tuple((n, length // context_size, length) for n, length in zip(counts, longest, strict=True))
    if context_size == 1:
        return SegmentPlan(groups, key_rows, key_places)
    own = rows_of_rank(cu_seqlens, context_rank, context_size)
    rows, places = _side_by_side(starts[order] // context_size, lengths // context_size, counts)
    in_sequence = own - starts.repeat_interleave(cu_seqlens.long().diff())[own]
    gathered = gathered_places(cu_seqlens, context_size)
    keys = GatheredKeys(gathered[key_rows], torch.empty_like(key_places), in_sequence[rows])
    keys.packed_rows[gathered] = key_places
    return SegmentPlan(groups, rows, places, keys)


def _group_sizes(lengths: Int[Tensor, " B"]) -> list[int]:
    """How many of the sequences, longest first, go side by side each time."""
    counts, first = [], 0
    while first < len(lengths):
        longest = int(lengths[first])
        admitted = 1 if longest <= _SHORT else max(1, int(longest * _FILL))
        counts.append(int((lengths[first:] >= admitted).sum()))
        first += counts[-1]
    return counts


def _side_by_side(starts: Tensor, lengths: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """(row at each padded place, padded place of each row) when each group is padded to its longest sequence."""
    pad_rows, packed_rows = [], torch.empty(int(lengths.sum()), dtype=torch.long)
    places = 0
    for start, length in zip(starts.split(counts), lengths.split(counts), strict=True):
        n, longest = len(length), int(length[0])
        column = torch.arange(longest)[None]
        rows = start[:, None] + torch.minimum(column, length[:, None] - 1)
        real = column < length[:, None]
        pad_rows.append(rows.flatten())
        packed_rows[rows[real]] = (places + torch.arange(n * longest).view(n, longest))[real]
        places += n * longest
    return torch.cat(pad_rows), packed_rows


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence, rotary embedding included; a `core_attention` for layer specs.

    Heads are those of this tensor-parallel rank. No dropout. With context parallelism one all-gather of keys and
    values per pass, and one reduce-scatter of their gradients.
    """

    def __init__(self, config, layer_number, attn_mask_type=None, attention_type="self", **kwargs):
        super().__init__(config=config)
        self.scale = kwargs.get("softmax_scale")
        groups = kwargs.get("pg_collection")
        self.context_group = groups.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Float[Tensor, "T h d"],
        key: Float[Tensor, "T g d"],
        value: Float[Tensor, "T g v"],
        attention_mask: None = None,
        *,
        packed_seq_params,
        **kwargs,
    ) -> Float[Tensor, "T hv"]:
        """h query heads share g key and value heads. `packed_seq_params` is a `PackedSequences`."""
        packed = packed_seq_params
        if packed.rope is not None:
            query = rotate(query, *packed.rope)
            key = rotate(key, *packed.rope)
        plan = packed.plan
        query = _Pad.apply(query, plan.pad_rows, plan.packed_rows)
        keys = plan if plan.keys is None else plan.keys
        if plan.keys is not None:
            both = gather_rows(torch.cat((key, value), dim=-1), self.context_group)
            key, value = both.split((key.shape[-1], value.shape[-1]), dim=-1)
        key, value = (_Pad.apply(x, keys.pad_rows, keys.packed_rows) for x in (key, value))
        out, at, key_at = [], 0, 0
        for n, queries, length in plan.groups:
            rows, key_rows = slice(at, at + n * queries), slice(key_at, key_at + n * length)
            q = query[rows].view(n, queries, *query.shape[1:]).transpose(1, 2)
            k, v = (x[key_rows].view(n, length, *x.shape[1:]).transpose(1, 2) for x in (key, value))
            seen = None
            if plan.keys is not None:
                positions = plan.keys.positions[rows].view(n, 1, queries, 1)
                seen = positions >= torch.arange(length, device=positions.device)
            o = self.attend(q, k, v, seen)
            out.append(o.transpose(1, 2).reshape(n * queries, -1))
            at, key_at = at + n * queries, key_at + n * length
        padded = out[0] if len(out) == 1 else torch.cat(out)
        return _Unpad.apply(padded, plan.packed_rows)

    def attend(
        self,
        query: Float[Tensor, "n h Q d"],
        key: Float[Tensor, "n g L d"],
        value: Float[Tensor, "n g L v"],
        seen: Bool[Tensor, "n 1 Q L"] | None,
    ) -> Float[Tensor, "n h Q v"]:
        """`seen`: which keys each query sees; None = those up to its own."""
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=seen is None, scale=self.scale, enable_gqa=True
        )


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
