"""Rows shared by decoder-only families. Each function gives the rows of one part of the model."""

from __future__ import annotations

from dppo_megatron.hf.hf_config import HFModelConfig
from dppo_megatron.hf.operations import QKV, GateUp, Operation, Replicated, Sharded, Vocabulary
from dppo_megatron.hf.rules import HFTensor, MegatronLayout, Rule


def decoder_rules(
    config: HFModelConfig, layout: MegatronLayout, attention: tuple[Rule, ...] | None = None
) -> tuple[Rule, ...]:
    """Every row of a decoder whose layers are dense or have experts. `attention` None: grouped queries."""
    sparse = tuple(i for i in range(config.num_layers) if config.is_moe_layer(i))
    dense = tuple(i for i in range(config.num_layers) if not config.is_moe_layer(i))
    return (
        *ends(config, layout),
        *(attention or grouped_query_attention(config)),
        *dense_mlp(config, dense),
        *(routed_experts(config, sparse) if config.moe else ()),
    )


def ends(config: HFModelConfig, layout: MegatronLayout) -> tuple[Rule, ...]:
    """Embedding, final norm and output head."""
    table = (config.vocab_size, config.hidden_size)
    op = Vocabulary(config.vocab_size, layout.padded_vocab_size)
    embedding = HFTensor("model.embed_tokens.weight", table)
    head = embedding if config.tied_embeddings else HFTensor("lm_head.weight", table)
    return (
        Rule(("embedding.word_embeddings.weight",), (embedding,), op),
        Rule(
            ("decoder.final_layernorm.weight",),
            (HFTensor("model.norm.weight", (config.hidden_size,)),),
            Replicated(),
        ),
        # With tied embeddings the last pipeline stage holds its own copy of the embedding under this name.
        Rule(("output_layer.weight",), (head,), op, duplicate=config.tied_embeddings),
    )


def grouped_query_attention(config: HFModelConfig) -> tuple[Rule, ...]:
    """Input norm, fused QKV with or without bias, per-head query and key norms, output projection."""
    layers = all_layers(config)
    hidden, dim = config.hidden_size, config.head_dim
    rows = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
    qkv = QKV(config.num_heads, config.num_kv_heads, dim)
    fused = "self_attention.linear_qkv"
    rules = [
        norm(
            layers,
            ("input_layernorm.weight", f"{fused}.layer_norm_weight"),
            "input_layernorm.weight",
            hidden,
        ),
        layer_rule(
            layers,
            (f"{fused}.weight",),
            tuple((f"self_attn.{p}_proj.weight", (n, hidden)) for p, n in rows.items()),
            qkv,
        ),
        layer_rule(
            layers,
            ("self_attention.linear_proj.weight",),
            (("self_attn.o_proj.weight", (hidden, config.num_heads * dim)),),
            Sharded(1),
        ),
    ]
    if config.qkv_bias:
        biases = tuple((f"self_attn.{p}_proj.bias", (n,)) for p, n in rows.items())
        rules.append(layer_rule(layers, (f"{fused}.bias",), biases, qkv))
    if config.qk_norm:
        for p in ("q", "k"):
            rules.append(norm(layers, (f"self_attention.{p}_layernorm.weight",), f"self_attn.{p}_norm.weight", dim))
    return tuple(rules)


def dense_mlp(config: HFModelConfig, layers: tuple[int, ...]) -> tuple[Rule, ...]:
    """Pre-MLP norm and SwiGLU feed-forward of the dense layers."""
    names = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    return (
        norm(layers, names, "post_attention_layernorm.weight", config.hidden_size),
        *swiglu(config, layers, "mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "mlp", config.ffn_hidden_size),
    )


def swiglu(
    config: HFModelConfig, layers: tuple[int, ...], fc1: str, fc2: str, hf_prefix: str, ffn: int
) -> tuple[Rule, ...]:
    """Gate and up fused into `fc1`, down as `fc2`, of one dense or shared feed-forward of width `ffn`."""
    hidden = config.hidden_size
    gate_up = tuple((f"{hf_prefix}.{p}_proj.weight", (ffn, hidden)) for p in ("gate", "up"))
    return (
        layer_rule(layers, (fc1,), gate_up, GateUp()),
        layer_rule(layers, (fc2,), ((f"{hf_prefix}.down_proj.weight", (hidden, ffn)),), Sharded(1)),
    )


def routed_experts(config: HFModelConfig, layers: tuple[int, ...]) -> tuple[Rule, ...]:
    """Pre-MLP norm, router, experts: one module each (local spec) or one numbered weight each (grouped)."""
    moe, hidden = config.moe, config.hidden_size
    ffn = moe.ffn_hidden_size
    prefix = "mlp.experts.{expert}"
    gate_up = tuple((f"{prefix}.{p}_proj.weight", (ffn, hidden)) for p in ("gate", "up"))
    down = ((f"{prefix}.down_proj.weight", (hidden, ffn)),)
    return (
        norm(layers, ("pre_mlp_layernorm.weight",), "post_attention_layernorm.weight", hidden),
        layer_rule(
            layers,
            ("mlp.router.weight",),
            (("mlp.gate.weight", (moe.num_experts, hidden)),),
            Replicated(),
        ),
        layer_rule(layers, _expert_names("linear_fc1"), gate_up, GateUp(), experts=moe.num_experts),
        layer_rule(layers, _expert_names("linear_fc2"), down, Sharded(1), experts=moe.num_experts),
    )


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
    """A row for the given layers; names are relative to the layer on both sides."""
    return Rule(
        tuple(f"decoder.layers.{{layer}}.{name}" for name in megatron),
        tuple(HFTensor(f"model.layers.{{layer}}.{name}", shape) for name, shape in hf),
        op,
        layers=layers,
        experts=experts,
        keep_dtype=keep_dtype,
    )


def all_layers(config: HFModelConfig) -> tuple[int, ...]:
    return tuple(range(config.num_layers))
