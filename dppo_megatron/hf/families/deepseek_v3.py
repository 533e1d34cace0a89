"""Defines DeepSeek-V3, Moonlight and Kimi K2: latent attention, dense first layers, routed and shared experts.

Kimi K2 names DeepSeek-V3's architecture and differs only in numbers and in `model_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dppo_megatron.hf.hf_config import HFModelConfig, MLAConfig
from dppo_megatron.hf.operations import Operation, Replicated, Sharded
from dppo_megatron.hf.raw_config import Size
from dppo_megatron.hf.rules import MegatronLayout, Rule

from .common import SigmoidExpertsConfig, decoder_rules, layer_rule, missing_null, norm
from .family import Family


class DeepseekV3Config(SigmoidExpertsConfig):
    q_lora_rank: Size | None = None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size

    def latent_attention(self) -> MLAConfig:
        return MLAConfig(
            self.q_lora_rank, self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        )

    def problems(self, raw: Mapping[str, Any]) -> list[str]:
        return super().problems(raw) + ([] if "q_lora_rank" in raw else [missing_null("q_lora_rank")])


def rules(config: HFModelConfig, layout: MegatronLayout) -> tuple[Rule, ...]:
    assert config.mla is not None  # DeepseekV3Config always returns it
    return decoder_rules(config, layout, latent_attention(config, config.mla, layout))


def latent_attention(config: HFModelConfig, mla: MLAConfig, layout: MegatronLayout) -> tuple[Rule, ...]:
    """Return the rules for multi-head latent attention. Both sides have contiguous heads, so no rule reorders rows."""
    layers, hidden, heads = config.attention_layers, config.hidden_size, config.num_heads
    by_head = Sharded(0)
    down = Sharded(0) if layout.shard_mla_down else Replicated()
    head_out = mla.qk_nope_head_dim + mla.v_head_dim

    def linear(megatron: str, hf: str, rows: int, columns: int, op: Operation = by_head) -> Rule:
        names = (f"self_attention.{megatron}.weight",)
        return layer_rule(layers, names, ((f"self_attn.{hf}.weight", (rows, columns)),), op)

    def latent_norm(which: str, hf: str, size: int) -> Rule:
        names = (f"{which}_layernorm.weight", f"linear_{which}_up_proj.layer_norm_weight")
        return norm(layers, tuple(f"self_attention.{n}" for n in names), f"self_attn.{hf}.weight", size)

    queries = (
        (linear("linear_q_proj", "q_proj", heads * config.head_dim, hidden),)
        if mla.q_lora_rank is None
        else (
            linear("linear_q_down_proj", "q_a_proj", mla.q_lora_rank, hidden, down),
            latent_norm("q", "q_a_layernorm", mla.q_lora_rank),
            linear("linear_q_up_proj", "q_b_proj", heads * config.head_dim, mla.q_lora_rank),
        )
    )
    compressed = mla.kv_lora_rank + mla.qk_rope_head_dim
    return (
        norm(layers, ("input_layernorm.weight",), "input_layernorm.weight", hidden),
        *queries,
        linear("linear_kv_down_proj", "kv_a_proj_with_mqa", compressed, hidden, down),
        latent_norm("kv", "kv_a_layernorm", mla.kv_lora_rank),
        linear("linear_kv_up_proj", "kv_b_proj", heads * head_out, mla.kv_lora_rank),
        linear("linear_proj", "o_proj", hidden, heads * mla.v_head_dim, Sharded(1)),
    )


DEEPSEEK_V3 = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", rope_types=("default", "yarn"), raw=DeepseekV3Config, rules=rules
)
