"""From a `config.json` and the run's settings to a Megatron TransformerConfig, or to every reason why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from dppo_megatron.config.schema import Config, ParallelConfig
from dppo_megatron.hf import HFModelConfig, ModelError

from . import megatron_version

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SHARD_UNIT = 128  # columns of the head per rank, for its GEMM
_SMALL_VOCAB = 4096  # below it, padding to the unit would cost more than it gains
# What Megatron-core's RotaryEmbedding takes for granted when it scales as Llama 3 does.
_MEGATRON_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def dtype(config: Config) -> torch.dtype:
    return _DTYPES[config.model.dtype]


def use_transformer_engine(config: Config) -> bool:
    """Which layer spec `model.layers` means on this machine."""
    if config.model.layers == "auto":
        return torch.cuda.is_available() and megatron_version.has_transformer_engine()
    return config.model.layers == "transformer_engine"


def padded_vocab_size(vocab_size: int, tensor_size: int) -> int:
    """Rows of the embedding over all ranks: equal shards, and for real vocabularies a multiple of 128 on each."""
    unit = tensor_size * (_SHARD_UNIT if vocab_size >= _SMALL_VOCAB else 1)
    return -(-vocab_size // unit) * unit


def model_problems(hf: HFModelConfig, config: Config) -> list[str]:
    """Every reason why `hf` cannot be trained here in the configured layout, each `setting = value: why; remedy`."""
    return machine_problems(config) + _family_problems(hf, config) + _layout_problems(hf, config.parallel)


def transformer_config(hf: HFModelConfig, config: Config) -> TransformerConfig:
    """The TransformerConfig of `hf` in the configured layout and precision.

    Raises ModelError with all of `model_problems`.
    """
    if problems := model_problems(hf, config):
        raise ModelError(str(config.model.path), problems)
    return TransformerConfig(
        **_FAMILIES[hf.family](hf),
        **_parallel_arguments(config),
        **_precision_arguments(config),
        **_recompute_arguments(config),
    )


def _decoder(hf: HFModelConfig) -> dict[str, Any]:
    """What the dense families share: RMSNorm before each part, grouped queries, SwiGLU, no dropout."""
    return {
        "num_layers": hf.num_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_heads,
        "num_query_groups": hf.num_kv_heads,
        "kv_channels": hf.head_dim,
        "ffn_hidden_size": hf.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "qk_layernorm": hf.qk_norm,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": hf.initializer_range,
    }


_FAMILIES: dict[str, Callable[[HFModelConfig], dict[str, Any]]] = {
    "qwen2": _decoder,
    "qwen3": _decoder,
    "llama": _decoder,
}


def _parallel_arguments(config: Config) -> dict[str, Any]:
    p = config.parallel
    interleaved = p.virtual_pipeline is not None
    return {
        "tensor_model_parallel_size": p.tensor,
        "pipeline_model_parallel_size": p.pipeline,
        "virtual_pipeline_model_parallel_size": p.virtual_pipeline,
        "context_parallel_size": p.context,
        "expert_model_parallel_size": p.expert,
        "expert_tensor_parallel_size": p.expert_tensor or p.tensor,
        "sequence_parallel": p.sequence,
        "variable_seq_lengths": p.pipeline > 1,  # packed micro-batches differ in length
        "moe_token_dispatcher_type": "alltoall",  # Megatron insists on it for them, in dense models too
        # Megatron's batched exchange between virtual stages gives wrong numbers over gloo, without an error.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # The loss is already a sum over explicit global denominators: no division by ranks or micro-batches.
        "calculate_per_token_loss": True,
    }


def _precision_arguments(config: Config) -> dict[str, Any]:
    parameters = dtype(config)
    fused = torch.cuda.is_available()
    return {
        "params_dtype": parameters,
        "pipeline_dtype": parameters,
        "bf16": parameters == torch.bfloat16,
        "use_cpu_initialization": not fused,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "apply_rope_fusion": use_transformer_engine(config),
        "gradient_accumulation_fusion": fused and megatron_version.has_fused_weight_gradient(),
    }


def _recompute_arguments(config: Config) -> dict[str, Any]:
    if config.model.recompute == "none":
        return {}
    if config.model.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def machine_problems(config: Config) -> list[str]:
    """What this installation lacks, whatever the model."""
    out = []
    if reason := megatron_version.unsupported_version():
        out.append(reason)
    if config.model.layers == "transformer_engine":
        if not torch.cuda.is_available():
            out.append("model.layers = transformer_engine: needs a CUDA device; set it to local or auto")
        elif not megatron_version.has_transformer_engine():
            out.append("model.layers = transformer_engine: it is not installed; install it or use auto")
    return out


def _family_problems(hf: HFModelConfig, config: Config) -> list[str]:
    out = []
    scaling = hf.rope_scaling
    if use_transformer_engine(config) and any(scaling.get(k, v) != v for k, v in _MEGATRON_LLAMA3.items()):
        out.append(
            f"model.layers = {config.model.layers}: Megatron's fused rotary embedding scales with fixed constants, "
            f"not those of {hf.source}; set it to local"
        )
    if hf.family not in _FAMILIES:
        out.append(
            f"model.path = {hf.source}: the trainer does not build {hf.architecture} yet; it builds "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    if hf.quantization is not None:
        out.append(f"model.path = {hf.source}: quantised weights cannot be trained; use the full-precision ones")
    return out


def _layout_problems(hf: HFModelConfig, p: ParallelConfig) -> list[str]:
    out = []
    sizes = {"attention heads": hf.num_heads, "key-value heads": hf.num_kv_heads}
    for what, size in sizes.items():
        if size % p.tensor:
            out.append(f"parallel.tensor = {p.tensor}: does not divide {size} {what}; {_divisors(size)}")
    if hf.ffn_hidden_size % p.tensor:
        out.append(f"parallel.tensor = {p.tensor}: does not divide intermediate_size = {hf.ffn_hidden_size}")
    stages = p.pipeline * (p.virtual_pipeline or 1)
    if hf.num_layers % stages:
        out.append(f"parallel.pipeline = {p.pipeline}: {stages} stages do not divide {hf.num_layers} layers")
    if p.context > 1:
        out.append(f"parallel.context = {p.context}: context parallelism is not built yet; set it to 1")
    if p.expert > 1 and hf.moe is None:
        out.append(f"parallel.expert = {p.expert}: the model has no experts; set it to 1")
    return out


def _divisors(size: int) -> str:
    return "use one of " + ", ".join(str(d) for d in range(1, size + 1) if size % d == 0)
