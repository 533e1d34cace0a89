"""Whether a Megatron model computes what config.json describes, field by field: shapes do not show everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .hf_config import HFModelConfig
from .megatron_model import unwrap
from .rope import inverse_frequencies

# Keys of a yarn `rope_scaling` and the fields of Megatron's MLATransformerConfig that mean them.
_YARN = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}


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
        out += _frequencies(chunk, config)
    return sorted(set(out))


def _frequencies(chunk: nn.Module, config: HFModelConfig) -> list[str]:
    """Megatron scales rotary frequencies with constants of its own, which no field shows: the numbers do."""
    found = getattr(getattr(chunk, "rotary_pos_emb", None), "inv_freq", None)
    if found is None or config.rope_type not in ("default", "llama3"):
        return []
    wanted = inverse_frequencies(config, config.mla.qk_rope_head_dim if config.mla else config.head_dim)
    if found.shape == wanted.shape and torch.allclose(found.cpu().float(), wanted, rtol=1e-4, atol=0):
        return []
    scaling = ", ".join(f"{k} = {v}" for k, v in config.rope_scaling.items())
    return [
        f"rotary frequencies of the Megatron model are not those of rope_type = {config.rope_type!r}, rope_theta = "
        f"{config.rope_theta:g}{', ' if scaling else ''}{scaling} in config.json"
    ]


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
        **{ours: config.rope_scaling[name] for name, ours in _YARN.items() if config.rope_scaling.get(name)},
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
