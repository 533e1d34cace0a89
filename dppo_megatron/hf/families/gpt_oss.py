"""Defines gpt-oss: attention sinks, a sliding window in every other layer, biases, and experts with a clamped SwiGLU.

Each Hugging Face expert tensor stacks all experts in a layer, transposed, with gate and up interleaved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dppo_megatron.hf.hf_config import HFModelConfig, MoEConfig, SinksConfig
from dppo_megatron.hf.operations import GateUp, OfExpert, Operation, Replicated, Sharded
from dppo_megatron.hf.raw_config import Experts, Positive, RawConfig, Size
from dppo_megatron.hf.rules import MegatronLayout, Rule

from .common import ends, grouped_query_attention, kind_problems, layer_rule, norm, only_problems
from .family import Family

_KINDS = {"sliding_attention": True, "full_attention": False}
_ONLY = {"swiglu_alpha": 1.702, "attention_bias": True}


class GptOssConfig(RawConfig):
    num_local_experts: Experts
    num_experts_per_tok: Size
    sliding_window: Size = 128
    layer_types: list[str] | None = None
    swiglu_limit: Positive = 7.0
    swiglu_alpha: Positive = 1.702
    attention_bias: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: Positive = 150000.0

    def qkv_bias(self) -> bool:
        return True

    def kinds(self) -> list[str]:
        return self.layer_types or [list(_KINDS)[i % 2] for i in range(self.num_hidden_layers)]

    def sinks(self) -> SinksConfig:
        windows = tuple(_KINDS.get(kind, True) for kind in self.kinds())
        return SinksConfig(self.sliding_window, windows, self.swiglu_limit)

    def experts(self) -> MoEConfig:
        return MoEConfig(
            num_experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            ffn_hidden_size=self.intermediate_size,
            layers=(True,) * self.num_hidden_layers,
        )

    def problems(self, raw: Mapping[str, Any]) -> list[str]:
        out = only_problems(self, _ONLY) + kind_problems(self.kinds(), self.num_hidden_layers, _KINDS)
        if not (self.rope_scaling or self.rope_parameters):  # transformers then assumes YaRN
            out.append("rope_parameters: missing")
        return out


def rules(config: HFModelConfig, layout: MegatronLayout) -> tuple[Rule, ...]:
    assert config.moe is not None  # GptOssConfig always returns it
    layers, hidden, experts = config.attention_layers, config.hidden_size, config.moe.num_experts
    ffn = config.moe.ffn_hidden_size

    def one(megatron: str, hf: str, shape: tuple[int, ...], op: Operation) -> Rule:
        return layer_rule(layers, (megatron,), ((hf, shape),), op)

    def expert(linear: str, hf: str, sizes: tuple[int, int], op: Operation, bias_op: Operation) -> tuple[Rule, Rule]:
        name, whole = f"mlp.experts.local_experts.{{expert}}.{linear}", f"mlp.experts.{hf}_proj"
        stored = ((name + ".weight", whole, sizes, op), (name + ".bias", f"{whole}_bias", sizes[1:], bias_op))
        return tuple(
            layer_rule(layers, (megatron,), ((tensor, (experts, *shape)),), OfExpert(inner), experts=experts)
            for megatron, tensor, shape, inner in stored
        )  # type: ignore[return-value]

    return (
        *ends(config, layout),
        *grouped_query_attention(config),
        one("self_attention.linear_proj.bias", "self_attn.o_proj.bias", (hidden,), Replicated()),
        one("self_attention.core_attention.softmax_offset", "self_attn.sinks", (config.num_heads,), Sharded(0)),
        norm(layers, ("pre_mlp_layernorm.weight",), "post_attention_layernorm.weight", hidden),
        one("mlp.router.weight", "mlp.router.weight", (experts, hidden), Replicated()),
        one("mlp.router.bias", "mlp.router.bias", (experts,), Replicated()),
        *expert("linear_fc1", "gate_up", (hidden, 2 * ffn), GateUp(), GateUp()),
        *expert("linear_fc2", "down", (ffn, hidden), Sharded(1), Replicated()),
    )


GPT_OSS = Family(
    "gpt_oss", "GptOssForCausalLM", head_dim=64, rope_types=("default", "yarn"), raw=GptOssConfig, rules=rules
)
