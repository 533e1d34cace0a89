"""Defines DeepSeek-V3 and Moonlight: latent attention, dense first layers, routed and shared experts, expert bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, Field

from dppo_megatron.hf.hf_config import MTP_NAMES, HFModelConfig, MLAConfig, MoEConfig
from dppo_megatron.hf.operations import Operation, Replicated, Sharded
from dppo_megatron.hf.raw_config import Experts, FromZero, RawConfig, Size
from dppo_megatron.hf.rules import MegatronLayout, Rule

from .common import all_layers, decoder_rules, layer_rule, norm, swiglu
from .family import Family

# Readers have different defaults for these keys. The keys of the first line may be null.
_NULLABLE = ("q_lora_rank", "n_shared_experts", "n_group", "topk_group")
_STATED = ("first_k_dense_replace", "routed_scaling_factor")
_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


class DeepseekV3Config(RawConfig):
    q_lora_rank: Size | None = None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    n_routed_experts: Experts = Field(validation_alias=AliasChoices("n_routed_experts", "num_local_experts"))
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    n_shared_experts: FromZero = 0
    first_k_dense_replace: FromZero = 0
    n_group: Experts | None = None
    topk_group: Experts | None = None
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    num_nextn_predict_layers: FromZero = Field(0, validation_alias=AliasChoices(*MTP_NAMES))

    def experts(self) -> MoEConfig:
        return MoEConfig(
            num_experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            ffn_hidden_size=self.moe_intermediate_size,
            layers=tuple(i >= self.first_k_dense_replace for i in range(self.num_hidden_layers)),
            norm_topk_prob=self.norm_topk_prob,
            score_function="sigmoid",
            shared_ffn_hidden_size=self.moe_intermediate_size * self.n_shared_experts,
            expert_bias=True,
            num_groups=self.n_group,
            topk_groups=self.topk_group,
            routed_scaling_factor=self.routed_scaling_factor,
        )

    def latent_attention(self) -> MLAConfig:
        return MLAConfig(
            self.q_lora_rank, self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        )

    def mtp_layers(self) -> int:
        return self.num_nextn_predict_layers

    def problems(self, given: Mapping[str, Any]) -> list[str]:
        out = [
            f"{name} = {given[name]!r}: only {only!r} is supported"
            for name, only in _ONLY.items()
            if given.get(name, only) != only
        ]
        out += [f"{name}: missing" for name in _STATED if given.get(name) is None]
        out += [f"{name}: missing; write null where the model has none" for name in _NULLABLE if name not in given]
        if (self.n_group or 1) > 1 and not self.topk_group:
            out.append(f"topk_group = {self.topk_group}: n_group = {self.n_group} needs it")
        return out


def rules(config: HFModelConfig, layout: MegatronLayout) -> tuple[Rule, ...]:
    moe, mla = config.moe, config.mla
    assert moe is not None  # DeepseekV3Config always returns both
    assert mla is not None
    sparse = tuple(i for i in range(config.num_layers) if config.is_moe_layer(i))
    bias = (("mlp.gate.e_score_correction_bias", (moe.num_experts,)),)
    out = [
        *decoder_rules(config, layout, latent_attention(config, mla, layout)),
        # Readers expect fp32: bf16 would change the selection of experts.
        layer_rule(sparse, ("mlp.router.expert_bias",), bias, Replicated(), keep_dtype=True),
    ]
    if shared := moe.shared_ffn_hidden_size:
        fc1, fc2 = ((f"mlp.shared_experts.linear_{fc}.weight",) for fc in ("fc1", "fc2"))
        out += swiglu(config, sparse, fc1, fc2, "mlp.shared_experts", shared)
    return tuple(out)


def latent_attention(config: HFModelConfig, mla: MLAConfig, layout: MegatronLayout) -> tuple[Rule, ...]:
    """Return the rules of multi-head latent attention. Heads are contiguous on both sides, so no rule reorders rows."""
    layers, hidden, heads = all_layers(config), config.hidden_size, config.num_heads
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
