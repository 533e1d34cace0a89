"""Reads live Megatron model chunks: global parameter names, ranks, layout.

In `hf` only this module uses Megatron, and only attributes that all supported versions have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .hf_config import HFModelConfig
from .rules import MegatronLayout

_LOCAL_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"(\.experts\.local_experts\.|\.experts\.linear_fc[12]\.weight)(\d+)(?=\.|$)")
_EXPERT_BIAS = ".mlp.router.expert_bias"

ADAPTER = "lora"  # name of the adapter module inside a linear layer


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Groups the ranks that share a parameter. `group` is None for a single rank."""

    group: dist.ProcessGroup | None
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class ParallelRanks:
    """Describes the groups that shard weights, and whether this rank is in the first data-parallel replica.

    Only the first replica exports.
    """

    tensor: ShardGroup
    expert_tensor: ShardGroup
    expert: ShardGroup
    first_replica: bool
    first_expert_replica: bool

    @classmethod
    def current(cls) -> ParallelRanks:
        """Read Megatron's `parallel_state`. If torch.distributed is not initialized, each group is a single rank."""
        if not (dist.is_available() and dist.is_initialized()):
            alone = ShardGroup(None, 0, 1)
            return cls(alone, alone, alone, True, True)
        from megatron.core import parallel_state as ps

        return cls(
            _shard_group(ps.get_tensor_model_parallel_group()),
            _shard_group(ps.get_expert_tensor_parallel_group()),
            _shard_group(ps.get_expert_model_parallel_group()),
            ps.get_data_parallel_group(with_context_parallel=True).rank() == 0,
            ps.get_expert_data_parallel_group().rank() == 0,
        )


def _shard_group(group: dist.ProcessGroup) -> ShardGroup:
    return ShardGroup(group if group.size() > 1 else None, group.rank(), group.size())


def unwrap(chunk: nn.Module) -> Any:
    """Return the GPTModel inside DistributedDataParallel and Float16Module."""
    model: Any = chunk
    while not hasattr(model, "decoder"):
        if not isinstance(getattr(model, "module", None), nn.Module):
            raise TypeError(f"{type(model).__name__} is neither a GPTModel nor a wrapper of one")
        model = model.module
    return model


def named_weights(model_chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield local parameters and the routers' expert biases under GLOBAL layer and expert indices, without adapters.

    All ranks in a tensor-parallel group yield them in the same order.
    """
    for chunk in map(unwrap, model_chunks):
        layers = chunk.decoder.layers
        for name, weight in _weights(chunk):
            yield global_name(name, layers), weight


def local_layers(model_chunks: Sequence[nn.Module]) -> dict[int, list[int] | None]:
    """Map each local layer's global index to the global indices of the local experts, or None for a dense layer."""
    layers = {}
    for chunk in map(unwrap, model_chunks):
        for layer in chunk.decoder.layers:
            experts = getattr(layer.mlp, "local_expert_indices", None)
            layers[layer.layer_number - 1] = None if experts is None else list(experts)
    return layers


def has_ends(model_chunks: Sequence[nn.Module]) -> tuple[bool, bool]:
    """Return which ends of the model this rank has, as two flags.

    - the embedding
    - the final norm and head
    """
    chunks = [unwrap(chunk) for chunk in model_chunks]
    return any(chunk.pre_process for chunk in chunks), any(chunk.post_process for chunk in chunks)


def infer_layout(model_chunks: Sequence[nn.Module], config: HFModelConfig, ranks: ParallelRanks) -> MegatronLayout:
    """Infer from local shapes the padded vocabulary and whether MLA down-projections are sharded."""
    padded = config.vocab_size
    shard_mla_down = False
    for chunk in map(unwrap, model_chunks):
        for name, weight in chunk.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                padded = weight.shape[0] * ranks.tensor.size
            elif name.endswith(".linear_kv_down_proj.weight") and config.mla is not None:
                shard_mla_down = weight.shape[0] != config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    return MegatronLayout(padded_vocab_size=padded, shard_mla_down=shard_mla_down)


def _weights(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, weight) for name, weight in chunk.named_parameters() if f".{ADAPTER}." not in name)
    for name, buffer in chunk.named_buffers():
        if name.endswith(_EXPERT_BIAS):
            yield name, buffer


def global_name(name: str, layers: Sequence[Any]) -> str:
    """Replace the local layer and expert indices in a parameter name by global indices."""
    match = _LOCAL_LAYER.match(name)
    if match is None:
        return name
    layer = layers[int(match.group(1))]
    name = f"decoder.layers.{layer.layer_number - 1}.{name[match.end() :]}"
    expert = _LOCAL_EXPERT.search(name)
    if expert is None:
        return name
    index = layer.mlp.local_expert_indices[int(expert.group(2))]
    return f"{name[: expert.start(2)]}{index}{name[expert.end(2) :]}"
