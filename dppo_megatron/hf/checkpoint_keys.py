"""Locates a weight in a Megatron torch_dist checkpoint by a global tensor key and an index into that tensor.

Megatron stores a global tensor per parameter, regardless of the layout that saved it. In a homogeneous model it stacks
the layers along a first axis; in any other model each layer has a separate key. A model is homogeneous unless
`moe_layer_freq` is a list, as in the trainer's models with experts. So a checkpoint with experts in all layers may
have either form. Experts are always stacked. Example: with 4 layers and 8 experts, expert 3 in layer 2 is

    layers stacked:  tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"][2, 3], tensor [4, 8, ...]
    layers separate: tensors["decoder.layers.2.mlp.experts.experts.linear_fc1.weight"][3], tensor [8, ...]
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .hf_config import HFModelConfig
from .rules import Entry

_LAYER = re.compile(r"^decoder\.layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.|\.experts\.(?=linear_fc[12]\.weight\d+$)")
# The local layer spec saves norms under the TransformerEngine spec's names, so that both specs load them.
_SAVED_SPELLINGS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}


@dataclass(frozen=True, slots=True)
class StoredAt:
    """Locates a weight as `tensors[key][index]`. `index` has one entry for each stacked axis (layer, expert)."""

    key: str
    index: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()  # sizes of the stacked axes


def possible_locations(entry: Entry, config: HFModelConfig, *, layers_stacked: bool) -> list[StoredAt]:
    """Return the locations that a weight may have under the names of both layer specs, local spec first."""
    spellings = [name.format(layer=entry.layer, expert=entry.expert) for name in entry.rule.megatron]
    for local, saved in _SAVED_SPELLINGS.items() if config.mla is None else ():
        spellings += [name.replace(local, saved) for name in spellings if local in name]
    return list(dict.fromkeys(_location(name, entry, config, layers_stacked) for name in spellings))


def stacks_layers(config: HFModelConfig) -> bool:
    """Return whether the trainer's model for this config stacks layers."""
    return config.moe is None and config.delta_net is None


def _location(name: str, entry: Entry, config: HFModelConfig, layers_stacked: bool) -> StoredAt:
    index: list[int] = []
    stacked: list[int] = []
    if entry.layer is not None and layers_stacked:
        name = _LAYER.sub("decoder.layers.", name)
        index.append(entry.layer)
        stacked.append(config.num_layers)
    if entry.expert is not None:
        # experts.local_experts.3.linear_fc1.weight and experts.linear_fc1.weight3 are spellings of the same weight.
        name = re.sub(r"(linear_fc[12]\.weight)\d+$", r"\1", _EXPERT.sub(".experts.experts.", name))
        index.append(entry.expert)
        stacked.append(entry.rule.experts)
    return StoredAt(name, tuple(index), tuple(stacked))
