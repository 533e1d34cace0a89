"""Records values inside a forward pass of the policy by hooks, under the names that engines use.

Given values replace the policy's values after these are recorded. Every operator then has the same inputs as the
engine's operator, so only that operator can cause a difference in the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from dppo_megatron.errors import ExpectedError
from dppo_megatron.rollout.engines.trace import OUTSIDE, SHARDED, Trace, joined
from dppo_megatron.types import TokenBatch

from .actor import Actor
from .local.operators import rotate

OF_COLUMNS = SHARDED | {"logits"}  # a tensor-parallel rank has some columns of these


class CannotTrace(ExpectedError, ValueError):
    """Raised if the layout splits a sequence, because sequences are compared as a whole, or for an unknown layer."""


def trace(actor: Actor, batch: TokenBatch, patches: Trace | None = None) -> Trace:
    """Trace the pass that scores `batch`, a single sequence. Rank 0 returns all values, in Hugging Face's head order.

    All ranks must call this function with the same `patches`. Besides the forward pass it gathers objects to rank 0.
    Raises `CannotTrace` under context parallelism and for gated delta net.
    """
    if actor.layout.context_size > 1:
        size = actor.layout.context_size
        raise CannotTrace(f"parallel.context = {size}: each rank has only parts of the sequences; set it to 1")
    if actor.hf.delta_net is not None:
        raise CannotTrace(f"model.path = {actor.hf.source}: gated delta net cannot be traced; use another model")
    recorder = _TraceRecorder(actor, len(batch.token_ids), patches or {})
    with recorder.hooks():
        actor.scores([batch])
    return recorder.whole()


class _TraceRecorder:
    def __init__(self, actor: Actor, size: int, patches: Trace):
        self._actor, self._layout = actor, actor.layout
        self._size = size
        self._patches = patches
        self._trace: Trace = {}

    def whole(self) -> Trace:
        """Gather the values from all ranks in the first replica on rank 0."""
        layout = self._layout
        rank_trace = (layout.pipeline_rank, layout.tensor_rank, self._trace) if layout.data_parallel_rank == 0 else None
        parts: list[Any] | None = [None] * layout.world_size if layout.rank == 0 else None
        dist.gather_object(rank_trace, parts, dst=0)
        whole: Trace = {}
        for stage in range(layout.pipeline_size):
            stage_parts = sorted((p for p in parts or () if p is not None and p[0] == stage), key=lambda p: p[1])
            if stage_parts:
                whole |= self._joined([trace for _, _, trace in stage_parts])
        return whole

    def _joined(self, parts: list[Trace]) -> Trace:
        trace = joined(parts, OF_COLUMNS)
        if self._layout.sequence_parallel:  # the other values are sharded by rows
            trace |= {key: torch.cat([p[key] for p in parts]) for key in trace if key[1] not in OF_COLUMNS}
        # The columns of the logits after the vocabulary are padding.
        vocabulary = {key: self._actor.hf.vocab_size for key in trace if key[1] == "logits"}
        return {key: value[: self._size, : vocabulary.get(key)] for key, value in trace.items()}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Record every value within the context, and replace values that have a patch."""
        with ExitStack() as stack:
            for chunk in self._actor.model_chunks:
                handles = [*self._outside(chunk)]
                for layer in chunk.decoder.layers:
                    handles += self._inside(layer, layer.layer_number - 1)
                    if isinstance(layer.mlp, MoELayer):
                        router = layer.mlp.router
                        router.gating = partial(self._gating, router.gating, layer.layer_number - 1)
                        stack.callback(delattr, router, "gating")
                for handle in handles:
                    stack.enter_context(handle)
            yield

    def _outside(self, chunk: Any) -> Iterator[Any]:
        if chunk.pre_process:
            yield self._output(chunk.embedding, OUTSIDE, "embedding")
        if chunk.post_process:
            yield self._input(chunk.decoder.final_layernorm, OUTSIDE, "final_residual")
            yield self._output(chunk.decoder.final_layernorm, OUTSIDE, "final_norm")
            if not chunk.fused_head:
                yield self._output(chunk.output_layer, OUTSIDE, "logits")

    def _inside(self, layer: Any, number: int) -> Iterator[Any]:
        attention, mlp = layer.self_attention, layer.mlp
        for norm, residual, normed in (
            (layer.input_layernorm, "residual", "input_norm"),
            (layer.pre_mlp_layernorm, "attention_residual", "mlp_norm"),
        ):
            yield self._input(norm, number, residual)
            if not isinstance(norm, IdentityOp):  # TransformerEngine norms inside the projection
                yield self._output(norm, number, normed)
        if hasattr(attention, "linear_qkv"):
            yield attention.linear_qkv.register_forward_hook(partial(self._qkv, number, attention))
            yield attention.core_attention.register_forward_pre_hook(partial(self._rotated, number), with_kwargs=True)
            for name, operator in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
                if not isinstance(getattr(attention, name, None), IdentityOp | None):
                    yield self._output(getattr(attention, name), number, operator)
        yield self._output(attention.core_attention, number, "attention")
        yield self._output(attention.linear_proj, number, "attention_projection")
        if not isinstance(mlp, MoELayer):
            yield mlp.linear_fc1.register_forward_hook(partial(self._gate_up, number))
            yield self._input(mlp.linear_fc2, number, "mlp_activation")
        yield self._output(mlp, number, "mlp")

    def _output(self, module: nn.Module, layer: int, operator: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
            if isinstance(output, tuple):
                return (self._record(layer, operator, output[0]), *output[1:])
            return self._record(layer, operator, output)

        return module.register_forward_hook(hook)

    def _input(self, module: nn.Module, layer: int, operator: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
            return (self._record(layer, operator, arguments[0]), *arguments[1:])

        return module.register_forward_pre_hook(hook)

    def _gating(self, gating: Callable[[Tensor], Tensor], layer: int, hidden: Tensor) -> Tensor:
        return self._record(layer, "router_logits", gating(hidden))

    def _qkv(self, layer: int, attention: Any, module: nn.Module, arguments: Any, output: Any) -> Any:
        """Split Megatron's layout: first the query heads, key and value of a group, then the next group."""
        groups = attention.num_query_groups_per_partition
        size = attention.hidden_size_per_attention_head
        heads = attention.num_attention_heads_per_partition // groups
        parts = output[0].unflatten(-1, (groups, -1)).split((heads * size, size, size), dim=-1)
        names = ("q_projection", "k_projection", "v_projection")
        projections = [self._record(layer, name, part) for name, part in zip(names, parts, strict=True)]
        return torch.cat(projections, dim=-1).flatten(-2), *output[1:]

    def _rotated(self, layer: int, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        query, key, value, *extra_args = arguments
        packed = options["packed_seq_params"]
        if packed.rope is not None:  # this hook rotates instead of PackedAttention
            query, key = (rotate(x, *packed.rope) for x in (query, key))
            options = options | {"packed_seq_params": replace(packed, rope=None)}
        query, key = (self._record(layer, name, x) for name, x in (("q_rotated", query), ("k_rotated", key)))
        return (query, key, value, *extra_args), options

    def _gate_up(self, layer: int, module: nn.Module, arguments: Any, output: Any) -> Any:
        parts = zip(("mlp_gate", "mlp_up"), output[0].chunk(2, dim=-1), strict=True)
        return torch.cat([self._record(layer, name, part) for name, part in parts], dim=-1), *output[1:]

    def _record(self, layer: int, operator: str, value: Tensor) -> Tensor:
        """Record this rank's part and return the value for the rest of the pass."""
        rows = value.shape[0]
        self._trace[layer, operator] = value.detach().reshape(rows, -1).to("cpu", copy=True)
        patch = self._patches.get((layer, operator))
        if patch is None or operator == "logits":
            return value
        layout = self._layout
        if operator in OF_COLUMNS:
            patch = patch.chunk(layout.tensor_size, dim=-1)[layout.tensor_rank]
        part = layout.tensor_rank if layout.sequence_parallel and operator not in OF_COLUMNS else 0
        patch = F.pad(patch, (0, 0, 0, max(0, (part + 1) * rows - len(patch))))[part * rows : (part + 1) * rows]
        return patch.to(value).reshape(value.shape)
