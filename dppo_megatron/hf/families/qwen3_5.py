"""Defines the text models of Qwen3.5 and 3.6: gated delta net in most layers, gated attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, Field

from dppo_megatron.hf.hf_config import DeltaNetConfig, HFModelConfig, MoEConfig
from dppo_megatron.hf.operations import ByGroup, Sharded
from dppo_megatron.hf.raw_config import Experts, FromZero, Heads, RawConfig, Size
from dppo_megatron.hf.rules import MegatronLayout, Rule

from .common import decoder_rules, grouped_query_attention, kind_problems, layer_rule, norm
from .family import Family

_KINDS = {"linear_attention": True, "full_attention": False}


class Qwen35Config(RawConfig):
    linear_num_key_heads: Heads = 16
    linear_num_value_heads: Heads = 32
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_conv_kernel_dim: Size = 4
    layer_types: list[str] | None = None
    full_attention_interval: Size = 4
    output_gate_type: str = "silu"
    attn_output_gate: bool = True
    mtp_num_hidden_layers: FromZero = 0

    def mtp_layers(self) -> int:
        return self.mtp_num_hidden_layers

    def kinds(self) -> list[str]:
        interval, names = self.full_attention_interval, ("full_attention", "linear_attention")
        return self.layer_types or [names[(i + 1) % interval > 0] for i in range(self.num_hidden_layers)]

    def delta_net(self) -> DeltaNetConfig:
        return DeltaNetConfig(
            num_key_heads=self.linear_num_key_heads,
            num_value_heads=self.linear_num_value_heads,
            key_head_dim=self.linear_key_head_dim,
            value_head_dim=self.linear_value_head_dim,
            conv_kernel=self.linear_conv_kernel_dim,
            layers=tuple(_KINDS.get(kind, True) for kind in self.kinds()),
        )

    def problems(self, raw: Mapping[str, Any]) -> list[str]:
        out = kind_problems(self.kinds(), self.num_hidden_layers, _KINDS)
        if self.linear_num_value_heads % self.linear_num_key_heads:
            out.append(
                f"linear_num_value_heads = {self.linear_num_value_heads}: not a multiple of linear_num_key_heads = "
                f"{self.linear_num_key_heads}"
            )
        if self.output_gate_type not in ("silu", "swish"):
            out.append(f"output_gate_type = {self.output_gate_type!r}: only silu is supported")
        if not self.attn_output_gate:
            out.append("attn_output_gate = False: only attention with an output gate is supported")
        return out


class Qwen35MoeConfig(Qwen35Config):
    num_experts: Experts = Field(validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    shared_expert_intermediate_size: Size
    intermediate_size: Size = 1  # all layers have experts

    def experts(self) -> MoEConfig:
        return MoEConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            ffn_hidden_size=self.moe_intermediate_size,
            layers=(True,) * self.num_hidden_layers,
            shared_ffn_hidden_size=self.shared_expert_intermediate_size,
            shared_gate=True,
        )


def rules(config: HFModelConfig, layout: MegatronLayout) -> tuple[Rule, ...]:
    assert config.delta_net is not None  # Qwen35Config always returns it
    attention = (*grouped_query_attention(config), *gated_delta_net(config, config.delta_net))
    return decoder_rules(config, layout, attention)


def gated_delta_net(config: HFModelConfig, sizes: DeltaNetConfig) -> tuple[Rule, ...]:
    """Return the rules for gated delta net layers. The fused input projection is interleaved by key head."""
    layers = tuple(i for i, has_delta_net in enumerate(sizes.layers) if has_delta_net)
    hidden, heads, rows = config.hidden_size, sizes.num_value_heads, sizes.widths
    fused = {"qkv": (rows["q"], rows["k"], rows["v"]), **{name: (rows[name],) for name in ("z", "b", "a")}}
    inputs = tuple((f"linear_attn.in_proj_{name}.weight", (sum(sections), hidden)) for name, sections in fused.items())
    conv = (("linear_attn.conv1d.weight", (sum(fused["qkv"]), 1, sizes.conv_kernel)),)
    out = (("linear_attn.out_proj.weight", (hidden, rows["v"])),)
    by_head, groups = Sharded(0), sizes.num_key_heads
    together, convolved = ByGroup(groups, tuple(fused.values())), ByGroup(groups, (fused["qkv"],))

    def head_rule(name: str) -> Rule:
        return layer_rule(layers, (f"self_attention.{name}",), ((f"linear_attn.{name}", (heads,)),), by_head)

    return (
        norm(layers, ("input_layernorm.weight",), "input_layernorm.weight", hidden),
        layer_rule(layers, ("self_attention.in_proj.weight",), inputs, together),
        layer_rule(layers, ("self_attention.conv1d.weight",), conv, convolved),
        head_rule("dt_bias"),
        head_rule("A_log"),
        norm(layers, ("self_attention.out_norm.weight",), "linear_attn.norm.weight", sizes.value_head_dim),
        layer_rule(layers, ("self_attention.out_proj.weight",), out, Sharded(1)),
    )


def _family(name: str, architecture: str, wrapper: str, raw: type[RawConfig]) -> Family:
    shared: dict[str, Any] = {"qk_norm": True, "head_dim": 256, "partial_rotary": 0.25, "rules": rules}
    return Family(name, architecture, wrapper=wrapper, raw=raw, **shared)


QWEN3_5 = (
    _family("qwen3_5_text", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", Qwen35Config),
    _family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", Qwen35MoeConfig),
)
