"""Maps config.json to Megatron's TransformerConfig, to build a model and to check an existing model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .hf_config import DeltaNetConfig, HFModelConfig, MLAConfig, MoEConfig, SinksConfig
from .megatron_model import unwrap
from .rope import inverse_frequencies, yarn_scale


def transformer_fields(config: HFModelConfig) -> dict[str, Any]:
    """Return the TransformerConfig (or MLATransformerConfig) fields that decide the model's arithmetic."""
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
        **(_grouped_queries(config) if config.mla is None else _latent_attention(config, config.mla)),
        "num_moe_experts": config.moe.num_experts if config.moe else None,
        **(_experts(config.moe) if config.moe else {}),
        **(_delta_net(config.delta_net) if config.delta_net else {}),
        **(_sinks(config, config.sinks) if config.sinks else {}),
    }


def uncompared_fields(config: HFModelConfig) -> dict[str, Any]:
    """Return fields for building a model that `disagreements` does not compare.

    They matter only in training, have no meaning for this attention, or can be written in several ways. There is no
    balancing loss, and the correction bias keeps the loaded value, because RL adds nothing to the routing.
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


def _latent_attention(config: HFModelConfig, mla: MLAConfig) -> dict[str, Any]:
    """Return the latent attention fields with rotary settings, because Megatron rotates inside latent attention."""
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
    """Return the YaRN fields. Settings missing from config.json get transformers' defaults."""
    scaling = config.rope_scaling
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(scaling["factor"]),
        # Positions in training, before YaRN extended them.
        "original_max_position_embeddings": int(
            scaling.get("original_max_position_embeddings") or config.max_position_embeddings
        ),
        "beta_fast": float(scaling.get("beta_fast") or 32),
        "beta_slow": float(scaling.get("beta_slow") or 1),
        "mscale": float(scaling.get("mscale") or 1),
        "mscale_all_dim": float(scaling.get("mscale_all_dim") or 0),
    }


def _sinks(config: HFModelConfig, sinks: SinksConfig) -> dict[str, Any]:
    """Return the gpt-oss fields.

    YaRN's factor scales both queries and keys, so `softmax_scale` contains the factor squared. `window_size` counts the
    keys before a query.
    """
    factor = yarn_scale(config.rope_scaling) if config.rope_type == "yarn" else 1.0
    return {
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "softmax_scale": factor**2 * config.head_dim**-0.5,
        "window_size": (sinks.window - 1, 0),
        "window_attn_skip_freq": [int(has_window) for has_window in sinks.layers],
        "activation_func": quick_gelu,
        "activation_func_clamp_value": sinks.swiglu_limit,
        "glu_linear_offset": 1.0,
    }


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), an approximation of GELU (https://arxiv.org/abs/1606.08415, section 2)."""
    return x * torch.sigmoid(1.702 * x)


def _delta_net(sizes: DeltaNetConfig) -> dict[str, Any]:
    """Return the gated delta net fields: layers, attention gate and norms."""
    return {
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "linear_attention_freq": [int(has_delta_net) for has_delta_net in sizes.layers],
        "linear_conv_kernel_dim": sizes.conv_kernel,
        "linear_key_head_dim": sizes.key_head_dim,
        "linear_value_head_dim": sizes.value_head_dim,
        "linear_num_key_heads": sizes.num_key_heads,
        "linear_num_value_heads": sizes.num_value_heads,
    }


def _experts(moe: MoEConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_score_function": moe.score_function,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_num_groups": moe.num_groups,
        "moe_router_group_topk": moe.topk_groups,
    }
    if moe.score_function == "softmax":
        # The softmax over selected logits equals the softmax over all logits, rescaled to sum to 1.
        fields["moe_router_pre_softmax"] = not moe.norm_topk_prob
    if moe.routed_scaling_factor != 1.0:
        fields["moe_router_topk_scaling_factor"] = moe.routed_scaling_factor
    return fields


def disagreements(model_chunks: Sequence[nn.Module], config: HFModelConfig) -> list[str]:
    """Return a line for every field where the chunks' TransformerConfig differs from `config`.

    Chunks without a `config` attribute, and fields that a Megatron version does not have, are skipped.
    """
    out = []
    for chunk in map(unwrap, model_chunks):
        megatron = getattr(chunk, "config", None)
        for name, expected in transformer_fields(config).items():
            actual = getattr(megatron, name, expected)
            if actual != expected:
                out.append(_line(name, actual, expected))
        rotary_base = getattr(chunk, "rotary_base", config.rope_theta)
        if rotary_base != config.rope_theta:
            out.append(_line("rotary_base", rotary_base, config.rope_theta))
        out += _frequencies(chunk, config)
    return sorted(set(out))


def _frequencies(chunk: nn.Module, config: HFModelConfig) -> list[str]:
    """Compare the rotary frequencies: Megatron scales them with constants that no field shows."""
    actual = getattr(getattr(chunk, "rotary_pos_emb", None), "inv_freq", None)
    if actual is None or config.rope_type not in ("default", "llama3"):
        return []
    expected = inverse_frequencies(config)
    if actual.shape == expected.shape and torch.allclose(actual.cpu().float(), expected, rtol=1e-4, atol=0):
        return []
    scaling = ", ".join(f"{k} = {v}" for k, v in config.rope_scaling.items())
    return [
        f"rotary frequencies of the Megatron model are not those of rope_type = {config.rope_type!r}, rope_theta = "
        f"{config.rope_theta:g}{', ' if scaling else ''}{scaling} in config.json"
    ]


def _line(name: str, actual: Any, expected: Any) -> str:
    return f"{name} = {actual!r} in the Megatron model, {expected!r} by config.json"
