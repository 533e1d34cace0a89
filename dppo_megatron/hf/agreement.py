"""Whether a Megatron model computes what config.json describes, field by field: shapes do not show everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from .hf_config import HFModelConfig
from .megatron_model import unwrap


def disagreements(model_chunks: Sequence[nn.Module], config: HFModelConfig) -> list[str]:
    """Every field where the TransformerConfig of the chunks differs from `config`, one line each.

    Chunks without a `config` attribute, and fields a Megatron version does not have, are passed over.
    """
    out = []
    for chunk in map(unwrap, model_chunks):
        megatron = getattr(chunk, "config", None)
        for name, wanted in _wanted(config).items():
            found = getattr(megatron, name, wanted)
            if found != wanted:
                out.append(_line(name, found, wanted))
        rotary_base = getattr(chunk, "rotary_base", config.rope_theta)
        if rotary_base != config.rope_theta:
            out.append(_line("rotary_base", rotary_base, config.rope_theta))
    return sorted(set(out))


def _line(name: str, found: Any, wanted: Any) -> str:
    return f"{name} = {found!r} in the Megatron model, {wanted!r} by config.json"


def _wanted(config: HFModelConfig) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig and the values that mean what `config` means."""
    wanted = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "ffn_hidden_size": config.ffn_hidden_size,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": config.qkv_bias,
        "num_moe_experts": config.moe.num_experts if config.moe else None,
    }
    return {**wanted, **_attention(config), **_experts(config)}


def _attention(config: HFModelConfig) -> dict[str, Any]:
    mla = config.mla
    if mla is None:
        return {
            "multi_latent_attention": False,
            "num_query_groups": config.num_kv_heads,
            "kv_channels": config.head_dim,
            "qk_layernorm": config.qk_norm,
        }
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rotary_base": config.rope_theta,
        "rope_type": "yarn" if config.rope_type == "yarn" else "rope",
    }


def _experts(config: HFModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {}
    wanted = {
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_router_score_function": moe.score_function,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_num_groups": moe.num_groups,
        "moe_router_group_topk": moe.topk_groups,
    }
    if moe.score_function == "softmax":
        # Softmax of the selected logits alone is softmax of all, rescaled to sum to 1.
        wanted["moe_router_pre_softmax"] = not moe.norm_topk_prob
    if moe.routed_scaling_factor != 1.0:
        wanted["moe_router_topk_scaling_factor"] = moe.routed_scaling_factor
    return wanted
