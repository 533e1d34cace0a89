"""Qwen3-MoE: the attention of Qwen3, experts in most layers."""

from __future__ import annotations

from dppo_megatron.hf.hf_config import HFModelConfig
from dppo_megatron.hf.rules import Family, MegatronLayout

from .common import dense_mlp, ends, grouped_query_attention, routed_experts


def family(config: HFModelConfig, layout: MegatronLayout) -> Family:
    sparse = tuple(i for i in range(config.num_layers) if config.is_moe_layer(i))
    dense = tuple(i for i in range(config.num_layers) if not config.is_moe_layer(i))
    rules = (
        *ends(config, layout),
        *grouped_query_attention(config),
        *dense_mlp(config, dense),
        *routed_experts(config, sparse),
    )
    return Family(rules)
