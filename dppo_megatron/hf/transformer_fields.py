"""The one table of what config.json means in Megatron's TransformerConfig.

The trainer builds its model with these fields, and `agreement` compares a given model with them.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from .hf_config import HFModelConfig


def transformer_fields(config: HFModelConfig) -> dict[str, Any]:
    """Fields of TransformerConfig (with latent attention: MLATransformerConfig) that decide what the model computes."""
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "ffn_hidden_size": config.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.qkv_bias,
        "multi_latent_attention": config.mla is not None,
        "qk_layernorm": config.qk_norm or config.mla is not None,
        **(_grouped_queries(config) if config.mla is None else _latent_attention(config)),
        "num_moe_experts": config.moe.num_experts if config.moe else None,
        **(_experts(config) if config.moe else {}),
    }


def uncompared_fields(config: HFModelConfig) -> dict[str, Any]:
    """Fields to build with that `agreement` does not compare.

    They matter in training alone, have no meaning for this attention, or can be written in several ways.
    No balancing loss, and the correction bias stays as it was loaded: RL adds nothing to the routing.
    """
    fields: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": config.initializer_range,
    }
    if config.mla is not None:
        fields |= _grouped_queries(config)
    if config.moe is not None:
        fields |= {
            "moe_layer_freq": [int(sparse) for sparse in config.moe.layers],
            "moe_router_bias_update_rate": 0.0,
            "moe_router_load_balancing_type": "none",
        }
    return fields


def _grouped_queries(config: HFModelConfig) -> dict[str, Any]:
    return {"num_query_groups": config.num_kv_heads, "kv_channels": config.head_dim}


def _latent_attention(config: HFModelConfig) -> dict[str, Any]:
    """Latent attention rotates inside Megatron, so its rotary settings are fields too."""
    mla = config.mla
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rotary_base": config.rope_theta,
        "rope_type": "rope",
        **(_yarn(config) if config.rope_type == "yarn" else {}),
    }


def _yarn(config: HFModelConfig) -> dict[str, Any]:
    """Settings that config.json leaves out are those of transformers."""
    given = config.rope_scaling
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(given["factor"]),
        # Positions that the model was trained on before YaRN stretched them.
        "original_max_position_embeddings": int(
            given.get("original_max_position_embeddings") or config.max_position_embeddings
        ),
        "beta_fast": float(given.get("beta_fast") or 32),
        "beta_slow": float(given.get("beta_slow") or 1),
        "mscale": float(given.get("mscale") or 1),
        "mscale_all_dim": float(given.get("mscale_all_dim") or 0),
    }


def _experts(config: HFModelConfig) -> dict[str, Any]:
    moe = config.moe
    fields = {
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
        fields["moe_router_pre_softmax"] = not moe.norm_topk_prob
    if moe.routed_scaling_factor != 1.0:
        fields["moe_router_topk_scaling_factor"] = moe.routed_scaling_factor
    return fields
