"""Locates a weight in a Megatron torch_dist checkpoint by the key of a global tensor and an index into it.

Megatron stores a global tensor per parameter, regardless of the layout that saved it. It stacks the layers of a
homogeneous model along a first axis and gives each layer of any other model its own key. A model is homogeneous unless
`moe_layer_freq` is a list, as in the trainer's models with experts. So a checkpoint of a model with experts in all
layers may have either form. Experts are always stacked. Example: expert 3 of layer 2 in a model of 4 layers with 8
experts is tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"][2, 3] of a [4, 8, ...] tensor, or without
stacked layers tensors["decoder.layers.2.mlp.experts.experts.linear_fc1.weight"][3].
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .hf_config import HFModelConfig
from .rules import Entry

_LAYER = re.compile(r"^decoder\.layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.|\.experts\.(?=linear_fc[12]\.weight\d+$)")
# The local layer spec saves its norms under the names of the TransformerEngine spec, so that both load them.
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
    """Return the possible locations of a weight by the names of both layer specs, the local spec first."""
    spellings = [name.format(layer=entry.layer, expert=entry.expert) for name in entry.rule.megatron]
    for local, saved in _SAVED_SPELLINGS.items() if config.mla is None else ():
        spellings += [name.replace(local, saved) for name in spellings if local in name]
    return list(dict.fromkeys(_location(name, entry, config, layers_stacked) for name in spellings))


def stacks_layers(config: HFModelConfig) -> bool:
    """Return whether the trainer's model of this config stacks its layers."""
    return config.moe is None and config.delta_net is None


def _location(name: str, entry: Entry, config: HFModelConfig, layers_stacked: bool) -> StoredAt:
    index: list[int] = []
    stacked: list[int] = []
    if entry.layer is not None and layers_stacked:
        name = _LAYER.sub("decoder.layers.", name)
        index.append(entry.layer)
        stacked.append(config.num_layers)
    if entry.expert is not None:
        # experts.local_experts.3.linear_fc1.weight and experts.linear_fc1.weight3 are stored as one tensor.
        name = re.sub(r"(linear_fc[12]\.weight)\d+$", r"\1", _EXPERT.sub(".experts.experts.", name))
        index.append(entry.expert)
        stacked.append(entry.rule.experts)
    return StoredAt(name, tuple(index), tuple(stacked))
