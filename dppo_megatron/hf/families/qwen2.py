"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from dppo_megatron.hf.hf_config import HFModelConfig
from dppo_megatron.hf.rules import Family, MegatronLayout

from .common import ROTARY_BUFFERS, all_layers, dense_mlp, ends, grouped_query_attention


def family(config: HFModelConfig, layout: MegatronLayout) -> Family:
    rules = (
        *ends(config, layout),
        *grouped_query_attention(config),
        *dense_mlp(config, all_layers(config)),
    )
    return Family(rules, ignored=(ROTARY_BUFFERS,))
