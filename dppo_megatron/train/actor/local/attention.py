"""Implements core attention for packed sequences (THD) with plain torch operators, for the local layer spec.

Megatron's local attention rejects packed sequences. Here a group of sequences of similar length is padded to a batch
for a causal SDPA call. Padding follows a row's real tokens, so causality hides it, and the result equals separate
attention per sequence. `PackedSequences.plan` assigns the rows (see `segments`). If this rank computes only a part of a
sequence, a mask replaces causality. On GPUs in 16 bits `local.flash` needs neither padding nor mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from dppo_megatron.train.actor.batch.flash import FlashPlan
from dppo_megatron.vocab_parallel.collectives import gather_sequence

from .flash import FlashAttention
from .operators import rotate

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from dppo_megatron.train.actor.batch.packing import PackedSequences


class PackedAttention(MegatronModule):
    """Computes causal attention within each packed sequence, rotary embedding included: layer specs' `core_attention`.

    Computes the heads of this tensor-parallel rank, without dropout. With context parallelism each pass runs an
    all-gather of keys and values, and a reduce-scatter of the gradients.
    """

    def __init__(
        self, config: TransformerConfig, *, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ):
        super().__init__(config=config)
        self.scale = softmax_scale
        self.context_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Float[Tensor, "T h d"],
        key: Float[Tensor, "T g d"],
        value: Float[Tensor, "T g v"],
        attention_mask: None = None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Float[Tensor, "T hv"]:
        """Attend with h query heads to g shared key and value heads."""
        rope, plan, width = packed_seq_params.rope, packed_seq_params.plan, value.shape[-1]
        if rope is not None:
            query, key = (rotate(x, *rope) for x in (query, key))
        if isinstance(plan, FlashPlan) and width < query.shape[-1]:  # latent attention; the kernel needs equal sizes
            value = F.pad(value, (0, query.shape[-1] - width))
        keys, values = key, value
        if self.context_group is not None:
            keys_and_values = gather_sequence(torch.cat((key, value), dim=-1), self.context_group)
            keys, values = keys_and_values.split((key.shape[-1], value.shape[-1]), dim=-1)
        if isinstance(plan, FlashPlan):
            whole = FlashAttention.apply(query, key, value, keys, values, plan, self.scale)
            return whole[..., :width].flatten(1)
        assert plan is not None  # the packer plans wherever TransformerEngine does not attend
        query = _Pad.apply(query, plan.pad_rows, plan.packed_rows, None)
        key_places: tuple[Tensor, Tensor, Tensor | None] = (plan.pad_rows, plan.packed_rows, None)
        if plan.keys is not None:
            key_places = (plan.keys.pad_rows, plan.keys.places, plan.keys.rows)
        key, value = (_Pad.apply(x, *key_places) for x in (keys, values))
        out, at, key_at = [], 0, 0
        for n, queries, length in plan.groups:
            rows, key_rows = slice(at, at + n * queries), slice(key_at, key_at + n * length)
            q = query[rows].view(n, queries, *query.shape[1:]).transpose(1, 2)
            k, v = (x[key_rows].view(n, length, *x.shape[1:]).transpose(1, 2) for x in (key, value))
            mask = None
            if plan.keys is not None and queries < length:
                positions = plan.keys.positions[rows].view(n, 1, queries, 1)
                mask = positions >= torch.arange(length, device=positions.device)
            out.append(self.attend(q, k, v, mask).transpose(1, 2).reshape(n * queries, -1))
            at, key_at = at + n * queries, key_at + n * length
        padded = out[0] if len(out) == 1 else torch.cat(out)
        return _Unpad.apply(padded, plan.packed_rows)

    def attend(
        self,
        query: Float[Tensor, "n h Q d"],
        key: Float[Tensor, "n g L d"],
        value: Float[Tensor, "n g L v"],
        mask: Bool[Tensor, "n 1 Q L"] | None,
    ) -> Float[Tensor, "n h Q v"]:
        """Attend to the keys in the `mask` of each query; None = the keys up to the query's position."""
        if query.is_cuda:  # torch's only kernel for grouped heads in fp32, or for a mask, stores all scores
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )


class SinkAttention(PackedAttention):
    """Adds a learned sink per head to the softmax denominator, and a sliding window in some layers (gpt-oss).

    Stores all scores of a layer, because SDPA has no sinks and returns no denominator.
    """

    def __init__(self, config: TransformerConfig, *, layer_number: int, pg_collection: Any = None, **options: Any):
        super().__init__(config, pg_collection=pg_collection, **options)
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        self.tp_group = pg_collection.tp
        self.window = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0]  # keys before the query

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        queries, length, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        if mask is None:
            mask = torch.ones(queries, length, dtype=torch.bool, device=query.device).tril()[None, None]
        if self.window is not None:  # the last key that a query sees is at the query's position
            columns = torch.arange(length, device=query.device)
            mask = mask & (columns >= mask.sum(-1, keepdim=True) - 1 - self.window)
        assert self.scale is not None  # `transformer_fields` sets it
        scores = (query @ key.mT * self.scale).float().masked_fill(~mask, -torch.inf)
        sinks = self.softmax_offset.float()[:, None, None].expand(*scores.shape[:-1], 1)
        shares = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        return shares.to(value.dtype) @ value

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Describe the sinks for a checkpoint that any tensor-parallel size can load."""
        return make_sharded_tensors_for_checkpoint(
            {"softmax_offset": self.softmax_offset},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


class _Pad(torch.autograd.Function):
    """Pad [T, ...] to [N, ...].

    Padding gets no gradient, because no real query sees padding. So the backward pass gathers from the padded index of
    each row. If a row is at several `places`, the backward pass sums over them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, pad_rows: Tensor, places: Tensor, rows: Tensor | None) -> Tensor:
        ctx.save_for_backward(places, rows)
        ctx.rows = x.shape[0]
        return x.index_select(0, pad_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        places, rows = ctx.saved_tensors
        grad = grad.index_select(0, places)
        if rows is not None:
            grad = grad.new_zeros(ctx.rows, *grad.shape[1:]).index_add_(0, rows, grad)
        return grad, None, None, None


class _Unpad(torch.autograd.Function):
    """Remove the padding, [N, ...] to [T, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed_rows: Tensor) -> Tensor:
        ctx.save_for_backward(packed_rows)
        ctx.places = x.shape[0]
        return x.index_select(0, packed_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (packed_rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.places, *grad.shape[1:]).index_copy_(0, packed_rows, grad), None
