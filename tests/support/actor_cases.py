"""Tiny models, configs and micro-batches that the tests and the ranks they spawn share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dppo_megatron.config import Config
from dppo_megatron.types import TokenBatch
from tests.support.configs import make_config

VOCAB = 37  # not a multiple of any tensor-parallel size: the head is padded
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "hidden_act": "silu",
    "initializer_range": 0.2,
}
MOE = {  # what a Qwen3 with experts adds
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
}
MLA_MOE = {  # what a DeepSeek-V3 adds, in place of head_dim
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
GLM4_MOE = {  # what a GLM-4.5 adds
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
    **{
        name: MLA_MOE[name]
        for name in (
            "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
            "first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob",
            "num_nextn_predict_layers",
        )
    },
}  # fmt: skip
DELTA_NET = {  # what a Qwen3.5 adds
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # Heads that are not too small, and a larger epsilon: the norm of small outputs amplifies rounding.
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rms_norm_eps": 1e-3,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "partial_rotary_factor": 0.5,
}
DELTA_MOE = {
    **DELTA_NET,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}
GPT_OSS = {  # what a gpt-oss adds
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "sliding_window": 5,
    "swiglu_limit": 0.7,  # small enough to clamp
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
GPT_OSS_SERVED = {  # the values with which vLLM computes, and sizes that its kernels for CPUs take
    **GPT_OSS,
    "head_dim": 32,
    "intermediate_size": 64,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QWEN3_MOE = {**QWEN3, **MOE}
QWEN3_5 = {**QWEN3, **DELTA_NET}
OSS = {**QWEN3, **GPT_OSS}
QWEN3_5_MOE = {**QWEN3, **DELTA_MOE}
GLM = {**QWEN3, **GLM4_MOE}
DEEPSEEK = {**{name: value for name, value in QWEN3.items() if name != "head_dim"}, **MLA_MOE}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MISTRAL = {**QWEN3, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
GLM_FLASH = {**DEEPSEEK, "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
K = 4


def write_config(directory: Path, **changes: Any) -> Path:
    """Write a model directory with only a config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    return directory


def set_expert_bias(directory: Path) -> None:
    """Correction biases large enough to change which experts are chosen; a new model has zeros."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(0)
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        for name in sorted(tensors):
            if name.endswith("e_score_correction_bias"):
                tensors[name].normal_(0, 0.3, generator=generator)
        save_file(tensors, path, metadata={"format": "pt"})


def actor_config(
    model: Path,
    *,
    parallel: dict | None = None,
    optimizer: dict | None = None,
    sections: dict[str, dict] | None = None,
    **model_settings: Any,
) -> Config:
    """`sections` are added to those that every test shares; the rest of the model's settings come by name."""
    tree = {
        "run": {"seed": 3},
        "model": {"path": str(model), "dtype": "fp32", **model_settings},
        "parallel": {"timeout_s": 60, **(parallel or {})},
        # Adam divides by |gradient|: with the usual eps, rounding decides the sign of the smallest ones.
        "optimizer": {"lr": 1e-2, "eps": 1e-4, "grad_clip": 0.5, **(optimizer or {})},
        "train": {"steps": 10},
    }
    return make_config(**(tree | (sections or {})))


def sequences(count: int = 12, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Sequences of 2 to 60 tokens with everything a DPPO top-K method reads, and their share of the loss."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [2, 60, *torch.randint(3, 30, (count - 2,), generator=generator).tolist()]
    out = []
    for size in lengths:
        tokens = torch.randint(0, VOCAB, (size,), generator=generator)
        mask = torch.arange(size) >= min(2, size - 2)
        mask[-1] = False
        ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:K] for _ in range(size)])
        logprobs = torch.randn(size, K + 1, generator=generator).log_softmax(-1)[:, :K] - 1.0
        out.append(
            {
                "token_ids": tokens,
                "mask": mask,
                "advantage": torch.randn(1, generator=generator).expand(size).contiguous(),
                "rollout_logprob": -3.5 + 0.5 * torch.randn(size, generator=generator),
                "topk_ids": ids.int(),
                "rollout_topk_logprob": logprobs,
                "temperature": torch.full((size,), 0.9),
            }
        )
    total = sum(int(s["mask"].sum()) for s in out)
    for s in out:
        s["loss_weight"] = s["mask"] / total
    return out


def pack(parts: list[dict[str, torch.Tensor]]) -> TokenBatch:
    sizes = torch.tensor([len(p["token_ids"]) for p in parts])
    mask = torch.cat([p["mask"] for p in parts])
    targets = torch.cat([p["token_ids"].roll(-1) for p in parts])
    names = ("token_ids", "advantage", "rollout_logprob", "topk_ids", "rollout_topk_logprob", "temperature")
    return TokenBatch(
        **{name: torch.cat([p[name] for p in parts]) for name in names},
        position_ids=torch.cat([torch.arange(int(size)) for size in sizes]),
        cu_seqlens=torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int(),
        target_ids=torch.where(mask, targets, 0),
        mask=mask,
        loss_weight=torch.cat([p["loss_weight"] for p in parts]).float(),
    )


def with_sampling_masks(batch: TokenBatch) -> TokenBatch:
    """Restrict every other loss row to its target and top-K ids."""
    named = torch.zeros(len(batch.mask), VOCAB, dtype=torch.bool).scatter_(1, batch.topk_ids.long(), True)
    named[torch.arange(len(named)), batch.target_ids] = True
    named &= (batch.mask & (torch.arange(len(named)) % 2 == 0))[:, None]
    return replace(batch, sampling_mask_ids=named.nonzero()[:, 1].int(), sampling_mask_counts=named.sum(1).int())


def micro_batches(parts: list[dict[str, torch.Tensor]], count: int) -> list[TokenBatch]:
    """`parts` dealt into `count` packed micro-batches."""
    return [pack(parts[i::count]) for i in range(count)]
