"""Adds adapters (`hf.lora`) to Megatron's parallel linear layers, and freezes the other weights.

A forward hook of a layer runs the adapter on the layer's input: hidden states [S, ..., inputs] of this rank. The
adapter exchanges tensors of width r, not of the layer's width. The table lists the collectives of the forward; backward
pass over the layer's group:

| layer | sequence-parallel | otherwise |
|---|---|---|
| shards its outputs | gather A x along the sequence; reduce-scatter | none; all-reduce |
| shards its inputs | reduce-scatter A x along the sequence; gather | all-reduce; none |
| of experts | none; all-reduce of a gradient of A or B | the same |
| whole on every rank | none | none |

Under sequence parallelism all ranks have A (if outputs are sharded) or B. At the end of an update Megatron sums the
gradient of this factor over the ranks, as for a norm. Megatron's dispatcher exchanges expert tokens before and after
the layer and sums the ranks' results, forward and backward, so the adapter's parts are summed as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor, nn
from torch.nn.functional import linear

from dppo_megatron.common.ranks import Ranks
from dppo_megatron.config.schema import Config
from dppo_megatron.hf import HFModelConfig, WeightMap
from dppo_megatron.hf.lora import Adapter, AdapterEntry, adapter_entry, adapters_of, target_problems
from dppo_megatron.hf.megatron_model import ADAPTER, ParallelRanks, global_name, infer_layout, named_weights, unwrap
from dppo_megatron.hf.operations import GateUp
from dppo_megatron.weights.fingerprint import MODULUS, bit_sum


class ParallelAdapter(Adapter):
    """Adapts a Megatron linear layer. The parameters have the attributes that Megatron's gradient reduction reads."""

    def __init__(self, entry: AdapterEntry, layer: Any, *, scaling: float, seed: int):
        group = layer.tp_group
        rank, size = (0, 1) if entry.b.op.replicated and not entry.shards_inputs else (group.rank(), group.size())
        super().__init__(entry, layer.weight, scaling=scaling, rank=rank, size=size, seed=seed)
        self._group = group
        self._expert = entry.b.is_expert
        self._sharded = size > 1
        self._sequence_parallel = self._sharded and not self._expert and layer.sequence_parallel
        a_and_b: tuple[Any, Any] = (self.A, self.B)  # Megatron reads attributes that a Parameter does not have
        shard, common = a_and_b if entry.shards_inputs else a_and_b[::-1]
        self._common = common if self._sharded else None
        if self._sharded or self._expert:
            # The gradient norm counts the shard of each rank, and the common parameter once.
            set_tensor_model_parallel_attributes(shard, True, 1 if entry.shards_inputs else 0, 1)
            if self._expert:
                set_tensor_model_parallel_attributes(common, True, -1, 1)
                common.shared = rank > 0
        for parameter in a_and_b:
            parameter.allreduce = getattr(layer.weight, "allreduce", True)
            if not self._sharded:
                parameter.sequence_parallel = getattr(layer.weight, "sequence_parallel", False)
        if self._sharded:
            common.sequence_parallel = self._sequence_parallel

    def forward(self, x: Tensor | None = None) -> Any:
        """Return (alpha / r) B A x, to be added to the layer's output. Without x, return A and B for `experts`."""
        if x is None:
            return self.A, self.B
        group = self._group
        if self._expert or not self._sharded:
            a, b = self.reducing(self.A, self.outputs())
            return linear(linear(x, a) * self.scaling, b)
        h = linear(x, self.A) * self.scaling
        if self.entry.shards_inputs and self._sequence_parallel:
            h = reduce_scatter_to_sequence_parallel_region(h, group)
        elif self.entry.shards_inputs:
            h = reduce_from_tensor_model_parallel_region(h, group)
        elif self._sequence_parallel:
            h = gather_from_sequence_parallel_region(h, group=group)
        else:
            h = copy_to_tensor_model_parallel_region(h, group)
        return linear(h, self.outputs())

    def reducing(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return an expert's A and B, single or stacked; the backward pass sums the gradient of the common factor."""
        if self._sharded and self.entry.shards_inputs:
            b = copy_to_tensor_model_parallel_region(b, self._group)
        elif self._sharded:
            a = copy_to_tensor_model_parallel_region(a, self._group)
        return a, b

    def sharded(self) -> dict[str, Any]:
        """Return this rank's parts of A and B for Megatron's checkpoints, which load in any layout."""
        out = {}
        for name, entry in (("A", self.entry.a), ("B", self.entry.b)):
            parameter = getattr(self, name)
            is_shard = self._sharded and parameter is not self._common
            copy = 0 if is_shard or self._expert else parallel_state.get_tensor_model_parallel_rank()
            if self._sharded and self._expert and not is_shard:
                copy = self._group.rank()
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            if self._expert:
                replica = parallel_state.get_expert_data_parallel_rank()
            axis = 1 if self.entry.shards_inputs else 0
            cut = [(axis, self._group.rank(), self._group.size())] if is_shard else []
            shard = ShardedTensor.from_rank_offsets(entry.megatron, parameter, *cut, replica_id=(0, copy, replica))
            gated = name == "B" and isinstance(getattr(entry.op, "op", entry.op), GateUp)
            out[name] = apply_swiglu_sharded_factory(shard, ()) if gated else shard
        return out


def sharded_adapters(chunk: nn.Module) -> dict[str, Any]:
    """Return the adapter tensors of a chunk that a checkpoint stores, by their names in the chunk's state."""
    return {
        f"{name}.{factor}": shard
        for name, module in chunk.named_modules()
        if isinstance(module, ParallelAdapter)
        for factor, shard in module.sharded().items()
    }


def lora_problems(hf: HFModelConfig, config: Config) -> list[str]:
    """Return why `model.lora` cannot be used with this model, each `setting = value: why; remedy`."""
    lora = config.model.lora
    if not lora.r:
        return []
    problems = target_problems(WeightMap(hf), lora.targets)
    return [f"model.lora.targets = {', '.join(lora.targets)}: {problem}" for problem in problems]


def add_adapters(chunks: Sequence[nn.Module], hf: HFModelConfig, config: Config) -> None:
    """Add an adapter to every layer that `model.lora.targets` names, and freeze all other parameters. No collectives.

    Call it before the chunks are wrapped, so that data parallelism and optimizer leave out the frozen parameters.
    """
    lora, weight_map = config.model.lora, WeightMap(hf)
    for chunk in map(unwrap, chunks):
        chunk.requires_grad_(False)
        for name, layer in list(chunk.named_modules()):
            if getattr(layer, "weight", None) is None or not hasattr(layer, "tp_group"):
                continue
            entry = weight_map.entry(global_name(f"{name}.weight", chunk.decoder.layers))
            if (adapter := adapter_entry(entry, lora.targets, lora.r)) is None:
                continue
            module = ParallelAdapter(adapter, layer, scaling=lora.alpha / lora.r, seed=config.run.seed)
            layer.add_module(ADAPTER, module)
            layer.register_forward_hook(_add)
        if config.model.recompute == "full" and chunk.pre_process:
            # A recomputed layer gets gradients only if an input requires a gradient, and the embedding is frozen.
            chunk.embedding.register_forward_hook(_with_gradient)


def frozen_sum(chunks: Sequence[nn.Module], hf: HFModelConfig) -> str:
    """Return a checksum of the model's frozen weights, equal in every layout. Collective over all ranks."""
    ranks, local_sum = ParallelRanks.current(), 0
    weight_map = WeightMap(hf, infer_layout(chunks, hf, ranks))
    for name, weight in named_weights(chunks):
        entry = weight_map.entry(name)
        group, first = ranks.tensor, ranks.first_replica
        if entry.is_expert:
            group, first = ranks.expert_tensor, ranks.first_expert_replica
        if first and not entry.rule.duplicate and (group.rank == 0 or not entry.op.replicated):
            local_sum += bit_sum(weight)
    return f"{sum(Ranks().gather(local_sum, 'the sum of the frozen weights')) % MODULUS:016x}"


def _add(layer: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> object:
    """Add the adapter's output in a forward hook; Megatron's linear layers return (output, bias to be added later)."""
    adapter = getattr(layer, ADAPTER)
    if not adapter.enabled:
        return output
    if isinstance(output, tuple):
        return output[0] + adapter(inputs[0]), *output[1:]
    return output + adapter(inputs[0])


def _with_gradient(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    return output if output.requires_grad else output.requires_grad_()


@contextmanager
def without_adapters(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Disable the adapters of `chunks` within the context."""
    adapters = list(adapters_of(chunks))
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True
