"""Fakes a GPTModel: parameters with the right names and shapes, but no arithmetic and no Megatron."""

import torch
from torch import nn

from dppo_megatron import hf

ALONE = hf.ShardGroup(None, 0, 1)


def ranks(tp_rank: int = 0, tp_size: int = 1) -> hf.ParallelRanks:
    """Return a rank's place without running ranks. Loading needs no more, because it issues no collectives."""
    return hf.ParallelRanks(hf.ShardGroup(None, tp_rank, tp_size), ALONE, ALONE, True, True)


def fake_chunk(config: hf.HFModelConfig, tp_size: int = 1) -> nn.Module:
    """Return a pipeline stage with every parameter of `config`, filled with NaN to show unwritten parameters."""
    padded = -(-config.vocab_size // tp_size) * tp_size
    weight_map = hf.WeightMap(config, hf.MegatronLayout(padded))
    chunk = nn.Module()
    chunk.pre_process = chunk.post_process = True
    chunk.decoder = nn.Module()
    chunk.decoder.layers = nn.ModuleList(nn.Module() for _ in range(config.num_layers))
    for index, layer in enumerate(chunk.decoder.layers):
        layer.layer_number = index + 1
        layer.mlp = nn.Module()
        if config.is_moe_layer(index):
            layer.mlp.local_expert_indices = list(range(config.moe.num_experts))
    for entry in weight_map.entries():
        if entry.rule.duplicate:
            continue
        parts = {t.name: torch.empty(t.shape) for t in entry.hf}
        size = 1 if entry.is_expert else tp_size
        put(chunk, entry.megatron, weight_map.to_megatron(entry, parts, 0, size).shape)
    return chunk


def put(chunk: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """Add the parameter `name` (a buffer for a router's expert bias) and missing parent modules."""
    *path, leaf = name.split(".")
    module = chunk
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    tensor = torch.full(shape, torch.nan)
    if leaf == "expert_bias":
        module.register_buffer(leaf, tensor)
    else:
        module.register_parameter(leaf, nn.Parameter(tensor))
