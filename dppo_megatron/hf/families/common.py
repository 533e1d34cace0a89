"""Provides the rules that decoder-only families share. Each function returns the rules for a part of the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import AliasChoices, Field

from dppo_megatron.hf.hf_config import MTP_NAMES, HFModelConfig, MoEConfig
from dppo_megatron.hf.operations import QKV, GateUp, Operation, Replicated, Sharded, Vocabulary
from dppo_megatron.hf.raw_config import Experts, FromZero, RawConfig, Size
from dppo_megatron.hf.rules import HFTensor, MegatronLayout, Rule

# Readers have different defaults for these `SigmoidExpertsConfig` keys. Keys in the first line may be null.
_NULLABLE = ("n_shared_experts", "n_group", "topk_group")
_STATED = ("first_k_dense_replace", "routed_scaling_factor")
_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


class SigmoidExpertsConfig(RawConfig):
    """Contains the keys of DeepSeek-V3's experts and router, which other families share."""

    n_routed_experts: Experts = Field(validation_alias=AliasChoices("n_routed_experts", "num_local_experts"))
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    n_shared_experts: FromZero = 0
    first_k_dense_replace: FromZero = 0
    n_group: Experts | None = None
    topk_group: Experts | None = None
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    moe_layer_freq: int = 1
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

    def mtp_layers(self) -> int:
        return self.num_nextn_predict_layers

    def problems(self, raw: Mapping[str, Any]) -> list[str]:
        out = only_problems(self, _ONLY)
        out += [f"{name}: missing" for name in _STATED if raw.get(name) is None]
        out += [missing_null(name) for name in _NULLABLE if name not in raw]
        if (self.n_group or 1) > 1 and not self.topk_group:
            out.append(f"topk_group = {self.topk_group}: n_group = {self.n_group} needs it")
        return out


def only_problems(config: RawConfig, only: Mapping[str, Any]) -> list[str]:
    """List the keys in `only` with another value than the supported value, one line each."""
    return [
        f"{name} = {getattr(config, name)!r}: only {value!r} is supported"
        for name, value in only.items()
        if getattr(config, name) != value
    ]


def kind_problems(kinds: Sequence[str], layers: int, supported: Collection[str]) -> list[str]:
    """List the problems of `layer_types`: a wrong number of entries, kinds of layers that are not supported."""
    out = [] if len(kinds) == layers else [f"layer_types: {len(kinds)} entries for num_hidden_layers = {layers}"]
    if unknown := sorted(set(kinds) - set(supported)):
        out.append(f"layer_types: {', '.join(unknown)} not supported; only {', '.join(supported)}")
    return out


def missing_null(name: str) -> str:
    return f"{name}: missing; write null where the model has none"


def decoder_rules(
    config: HFModelConfig, layout: MegatronLayout, attention: tuple[Rule, ...] | None = None
) -> tuple[Rule, ...]:
    """Return every rule for a decoder with dense or expert layers. By default attention has grouped queries."""
    sparse = tuple(i for i in range(config.num_layers) if config.is_moe_layer(i))
    dense = tuple(i for i in range(config.num_layers) if not config.is_moe_layer(i))
    return (
        *ends(config, layout),
        *(attention or grouped_query_attention(config)),
        *dense_mlp(config, dense),
        *(routed_experts(config, config.moe, sparse) if config.moe else ()),
    )


def ends(config: HFModelConfig, layout: MegatronLayout) -> tuple[Rule, ...]:
    """Return the rules for embedding, final norm and output head."""
    table = (config.vocab_size, config.hidden_size)
    op = Vocabulary(config.vocab_size, layout.padded_vocab_size)
    embedding = HFTensor("model.embed_tokens.weight", table)
    final_norm = HFTensor("model.norm.weight", (config.hidden_size,))
    head = embedding if config.tied_embeddings else HFTensor("lm_head.weight", table)
    return (
        Rule(("embedding.word_embeddings.weight",), (embedding,), op),
        Rule(("decoder.final_layernorm.weight",), (final_norm,), Replicated()),
        # With tied embeddings the last pipeline stage has an embedding copy under this name.
        Rule(("output_layer.weight",), (head,), op, duplicate=config.tied_embeddings),
    )


def grouped_query_attention(config: HFModelConfig) -> tuple[Rule, ...]:
    """Return the rules for input norm, fused QKV (and bias), per-head query and key norms, output projection.

    In a model with gated delta net, the query projection also has the output gate.
    """
    layers, gated = config.attention_layers, config.delta_net is not None
    hidden, dim = config.hidden_size, config.head_dim
    outputs, kv = config.num_heads * dim, config.num_kv_heads * dim
    rows = {"q": outputs * (1 + gated), "k": kv, "v": kv}
    qkv = QKV(config.num_heads, config.num_kv_heads, dim, gated)
    fused = "self_attention.linear_qkv"
    weights = tuple((f"self_attn.{p}_proj.weight", (n, hidden)) for p, n in rows.items())
    out = (("self_attn.o_proj.weight", (hidden, outputs)),)
    norms = ("input_layernorm.weight", f"{fused}.layer_norm_weight")
    rules = [
        norm(layers, norms, "input_layernorm.weight", hidden),
        layer_rule(layers, (f"{fused}.weight",), weights, qkv),
        layer_rule(layers, ("self_attention.linear_proj.weight",), out, Sharded(1)),
    ]
    if config.qkv_bias:
        biases = tuple((f"self_attn.{p}_proj.bias", (n,)) for p, n in rows.items())
        rules.append(layer_rule(layers, (f"{fused}.bias",), biases, qkv))
    if config.qk_norm:
        for p in ("q", "k"):
            rules.append(norm(layers, (f"self_attention.{p}_layernorm.weight",), f"self_attn.{p}_norm.weight", dim))
    return tuple(rules)


def dense_mlp(config: HFModelConfig, layers: tuple[int, ...]) -> tuple[Rule, ...]:
    """Return the rules for pre-MLP norm and SwiGLU feed-forward in dense layers."""
    names = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    linear = ("mlp.linear_fc1.weight",), ("mlp.linear_fc2.weight",)
    return (
        norm(layers, names, "post_attention_layernorm.weight", config.hidden_size),
        *swiglu(config, layers, *linear, "mlp", config.ffn_hidden_size),
    )


def swiglu(
    config: HFModelConfig,
    layers: tuple[int, ...],
    fc1: tuple[str, ...],
    fc2: tuple[str, ...],
    hf_prefix: str,
    ffn: int,
    experts: int = 0,
) -> tuple[Rule, ...]:
    """Return the rules for feed-forwards with width `ffn`: gate and up fused into `fc1`, down as `fc2`."""
    hidden = config.hidden_size
    gate_up = tuple((f"{hf_prefix}.{p}_proj.weight", (ffn, hidden)) for p in ("gate", "up"))
    down = ((f"{hf_prefix}.down_proj.weight", (hidden, ffn)),)
    return (
        layer_rule(layers, fc1, gate_up, GateUp(), experts=experts),
        layer_rule(layers, fc2, down, Sharded(1), experts=experts),
    )


def routed_experts(config: HFModelConfig, moe: MoEConfig, layers: tuple[int, ...]) -> tuple[Rule, ...]:
    """Return the rules for pre-MLP norm, router (and correction bias), experts (and shared experts).

    Each expert is a module (local spec) or a numbered weight (grouped).
    """
    hidden = config.hidden_size
    router = (("mlp.gate.weight", (moe.num_experts, hidden)),)
    linear = _expert_names("linear_fc1"), _expert_names("linear_fc2")
    rules = [
        norm(layers, ("pre_mlp_layernorm.weight",), "post_attention_layernorm.weight", hidden),
        layer_rule(layers, ("mlp.router.weight",), router, Replicated()),
        *swiglu(config, layers, *linear, "mlp.experts.{expert}", moe.ffn_hidden_size, moe.num_experts),
    ]
    if moe.expert_bias:
        bias = (("mlp.gate.e_score_correction_bias", (moe.num_experts,)),)
        # Readers expect fp32: bf16 would change the selection of experts.
        rules.append(layer_rule(layers, ("mlp.router.expert_bias",), bias, Replicated(), keep_dtype=True))
    if shared := moe.shared_ffn_hidden_size:
        fc1, fc2 = ((f"mlp.shared_experts.linear_{fc}.weight",) for fc in ("fc1", "fc2"))
        name = "mlp.shared_expert" if moe.shared_gate else "mlp.shared_experts"
        rules += swiglu(config, layers, fc1, fc2, name, shared)
        if moe.shared_gate:
            gate = (("mlp.shared_expert_gate.weight", (1, hidden)),)
            rules.append(layer_rule(layers, ("mlp.shared_experts.gate_weight",), gate, Replicated()))
    return tuple(rules)


def _expert_names(linear: str) -> tuple[str, str]:
    return f"mlp.experts.local_experts.{{expert}}.{linear}.weight", f"mlp.experts.{linear}.weight{{expert}}"


def norm(layers: tuple[int, ...], megatron: tuple[str, ...], hf: str, size: int) -> Rule:
    return layer_rule(layers, megatron, ((hf, (size,)),), Replicated())


def layer_rule(
    layers: tuple[int, ...],
    megatron: tuple[str, ...],
    hf: tuple[tuple[str, tuple[int, ...]], ...],
    op: Operation,
    *,
    experts: int = 0,
    keep_dtype: bool = False,
) -> Rule:
    """Return a rule for the given layers; names are relative to the layer on both sides."""
    return Rule(
        tuple(f"decoder.layers.{{layer}}.{name}" for name in megatron),
        tuple(HFTensor(f"model.layers.{{layer}}.{name}", shape) for name, shape in hf),
        op,
        layers=layers,
        experts=experts,
        keep_dtype=keep_dtype,
    )
