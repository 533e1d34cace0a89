"""DeepSeek-V3 and Moonlight: latent attention, dense first layers, routed and shared experts, expert bias."""

from __future__ import annotations

from dppo_megatron.hf.hf_config import HFModelConfig
from dppo_megatron.hf.operations import Operation, Replicated, Sharded
from dppo_megatron.hf.rules import Family, MegatronLayout, Rule

from .common import ROTARY_BUFFERS, all_layers, dense_mlp, ends, layer_rule, norm, routed_experts, swiglu


def family(config: HFModelConfig, layout: MegatronLayout) -> Family:
    sparse = tuple(i for i in range(config.num_layers) if config.is_moe_layer(i))
    dense = tuple(i for i in range(config.num_layers) if not config.is_moe_layer(i))
    rules = [
        *ends(config, layout),
        *latent_attention(config, layout),
        *dense_mlp(config, dense),
        *routed_experts(config, sparse),
        layer_rule(
            sparse,
            ("mlp.router.expert_bias",),
            (("mlp.gate.e_score_correction_bias", (config.moe.num_experts,)),),
            Replicated(),
            keep_dtype=True,  # readers expect fp32: bf16 would change which experts are selected
        ),
    ]
    if shared := config.moe.shared_ffn_hidden_size:
        fc1, fc2 = (f"mlp.shared_experts.linear_{fc}.weight" for fc in ("fc1", "fc2"))
        rules += swiglu(config, sparse, fc1, fc2, "mlp.shared_experts", shared)
    return Family(tuple(rules), ignored=(ROTARY_BUFFERS, *_mtp_names(config)))


def latent_attention(config: HFModelConfig, layout: MegatronLayout) -> tuple[Rule, ...]:
    """Multi-head latent attention. Heads are contiguous on both sides, so every projection is a plain cut."""
    layers, mla = all_layers(config), config.mla
    hidden, heads = config.hidden_size, config.num_heads
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


def _mtp_names(config: HFModelConfig) -> tuple[str, ...]:
    """Multi-token-prediction layers are stored as layers behind the last one."""
    return tuple(rf"model\.layers\.{config.num_layers + i}\..*" for i in range(config.mtp_layers))
