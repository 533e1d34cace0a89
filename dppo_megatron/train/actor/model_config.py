"""Turns a `config.json` and the run's settings into a Megatron TransformerConfig, or lists why that fails."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.config.schema import Config, ParallelConfig
from dppo_megatron.hf import HFModelConfig, ModelError, MoEConfig
from dppo_megatron.hf.transformer_fields import transformer_fields, uncompared_fields

from . import megatron_version
from .lora import lora_problems
from .megatron_import import load_problem
from .precision import capability_problems, fuses_weight_gradient, installation_problems, precision_arguments, this_gpu

# Constants of Megatron-core's RotaryEmbedding with Llama 3 scaling.
_MEGATRON_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def dtype(config: Config) -> torch.dtype:
    return DTYPES[config.model.dtype].torch


def use_transformer_engine(config: Config) -> bool:
    """Return whether `model.layers` means TransformerEngine here. TransformerEngine layers have no adapters."""
    if config.model.layers == "auto":
        return torch.cuda.is_available() and megatron_version.has_transformer_engine() and not config.model.lora.r
    return config.model.layers == "transformer_engine"


def overlaps_communication(config: Config) -> bool:
    """Return whether `parallel.overlap` is on for this machine."""
    return torch.cuda.is_available() if config.parallel.overlap is None else config.parallel.overlap


def shares_prefixes(hf: HFModelConfig, config: Config) -> bool:
    """Return whether `train.share_prefixes` is on for this model on this machine."""
    setting = config.train.share_prefixes
    return not prefix_problems(hf, config) if setting is None else setting


def prefix_problems(hf: HFModelConfig, config: Config) -> list[str]:
    """Return why a micro-batch cannot compute a prompt once for all samples."""
    remedy = "or set train.share_prefixes to false"
    obstacles = (
        (
            use_transformer_engine(config),
            "TransformerEngine's attention has no sequences that continue rows of another; set model.layers to local",
        ),
        (
            hf.mla is not None,
            "Megatron's latent attention rotates each packed sequence from position 0; use another model",
        ),
        (
            hf.delta_net is not None,
            "the samples would need the state of gated delta net after the prompt; use another model",
        ),
        (config.parallel.context > 1, "ranks have parts of each sequence; set parallel.context to 1"),
        (config.engine.exact, "each row is computed as the engine does; set engine.exact to false"),
        (
            config.rollout.routing_replay,
            "engines may route a prompt differently for each of its samples; set rollout.routing_replay to false",
        ),
    )
    return [f"train.share_prefixes = true: {reason}, {remedy}" for applies, reason in obstacles if applies]


def model_problems(hf: HFModelConfig, config: Config) -> list[str]:
    """Return every reason why `hf` cannot be trained here, each `setting = value: why; remedy`."""
    problems = machine_problems(config) + _family_problems(hf, config) + _layout_problems(hf, config.parallel)
    if config.train.share_prefixes:
        problems += prefix_problems(hf, config)
    return problems + lora_problems(hf, config)


def transformer_config(hf: HFModelConfig, config: Config) -> TransformerConfig:
    """Return the TransformerConfig of `hf` in the configured layout and precision.

    Raises ModelError with all of `model_problems`.
    """
    if problems := model_problems(hf, config):
        raise ModelError(str(config.model.path), problems)
    build = TransformerConfig if hf.mla is None else MLATransformerConfig
    return build(
        **transformer_fields(hf),
        **uncompared_fields(hf),
        **_expert_arguments(hf, config),
        **_parallel_arguments(config),
        **_precision_arguments(hf, config),
        **precision_arguments(config),
        **_recompute_arguments(config),
    )


def _expert_arguments(hf: HFModelConfig, config: Config) -> dict[str, Any]:
    """Return how this run dispatches and computes experts; their sizes are in `transformer_fields`."""
    if hf.moe is None:
        return {"moe_token_dispatcher_type": "alltoall"}  # Megatron requires it for packed lengths, which vary
    return {
        "moe_token_dispatcher_type": config.parallel.expert_dispatcher,
        "moe_router_dtype": "fp32" if config.model.router_dtype == "fp32" else None,
        "moe_grouped_gemm": use_transformer_engine(config),
        "moe_enable_routing_replay": config.rollout.routing_replay,
    }


def _parallel_arguments(config: Config) -> dict[str, Any]:
    p = config.parallel
    interleaved = p.virtual_pipeline is not None
    return {
        "tensor_model_parallel_size": p.tensor,
        "pipeline_model_parallel_size": p.pipeline,
        "virtual_pipeline_model_parallel_size": p.virtual_pipeline,
        "num_layers_in_first_pipeline_stage": p.first_stage_layers,
        "num_layers_in_last_pipeline_stage": p.last_stage_layers,
        "context_parallel_size": p.context,
        "expert_model_parallel_size": p.expert,
        "expert_tensor_parallel_size": p.expert_tensor or p.tensor,
        "sequence_parallel": p.sequence,
        "variable_seq_lengths": p.pipeline > 1,  # packed micro-batches differ in length
        # Megatron's batched exchange between virtual stages gives silently wrong numbers over gloo.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # The loss is already divided by global denominators, so Megatron must not divide by ranks or micro-batches.
        "calculate_per_token_loss": True,
    }


def _precision_arguments(hf: HFModelConfig, config: Config) -> dict[str, Any]:
    parameters = dtype(config)
    fused = torch.cuda.is_available()
    return {
        "params_dtype": parameters,
        "pipeline_dtype": parameters,
        "bf16": parameters == torch.bfloat16,
        "fp16": parameters == torch.float16,
        "use_cpu_initialization": not fused,
        "bias_activation_fusion": fused and hf.sinks is None,  # its activation is `transformer_fields.quick_gelu`
        "bias_dropout_fusion": fused,
        # Megatron's fused rotation of latent attention supports only YaRN.
        "apply_rope_fusion": use_transformer_engine(config) and (hf.mla is None or hf.rope_type == "yarn"),
        "gradient_accumulation_fusion": fuses_weight_gradient(),
    }


def _recompute_arguments(config: Config) -> dict[str, Any]:
    if config.model.recompute == "none":
        return {}
    if config.model.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def machine_problems(config: Config) -> list[str]:
    """Return why this installation cannot train any model with these settings."""
    out = []
    if reason := megatron_version.unsupported_version():
        out.append(reason)
    out += _engine_problems(config, cuda=torch.cuda.is_available())
    if config.model.layers == "auto" and config.model.dtype == "fp32" and use_transformer_engine(config):
        out.append(
            "model.dtype = fp32: TransformerEngine, which model.layers = auto means here, has no attention kernel for "
            "packed sequences in fp32; set model.layers to local, or model.dtype to bf16"
        )
    return out + (capability_problems(config, this_gpu()) or installation_problems(config))


def _engine_problems(config: Config, *, cuda: bool) -> list[str]:
    """Return why TransformerEngine layers cannot be used. `auto` uses them on a GPU if they are installed."""
    out, layers, requires_engine = [], config.model.layers, config.model.layers == "transformer_engine"
    if requires_engine and not cuda:
        out.append("model.layers = transformer_engine: needs a CUDA device; set it to local or auto")
    missing = requires_engine and cuda and not megatron_version.has_transformer_engine()
    if missing or (load_problem() and (requires_engine or (layers == "auto" and cuda and not config.model.lora.r))):
        out.append(f"model.layers = {layers}: {megatron_version.engine_remedy()}, or set it to local")
    return out


def _family_problems(hf: HFModelConfig, config: Config) -> list[str]:
    out = []
    scaling = hf.rope_scaling
    source = f"model.path = {hf.source}"
    if use_transformer_engine(config):
        other_llama3 = hf.rope_type == "llama3" and any(scaling.get(k, v) != v for k, v in _MEGATRON_LLAMA3.items())
        obstacles = (
            (other_llama3, f"Megatron's fused rotary embedding scales with fixed constants, not those of {hf.source}"),
            (hf.delta_net is not None, "gated delta net is not implemented with TransformerEngine"),
            (hf.sinks is not None, "attention sinks are not implemented with TransformerEngine"),
        )
        setting = f"model.layers = {config.model.layers}"
        out += [f"{setting}: {reason}; set it to local" for applies, reason in obstacles if applies]
    if hf.delta_net is not None and config.parallel.context > 1:
        out.append(
            f"parallel.context = {config.parallel.context}: gated delta net needs whole sequences on a rank; set it "
            "to 1"
        )
    if hf.sinks is not None and config.model.lora.r:
        out.append(f"model.lora.r = {config.model.lora.r}: not implemented for layers with biases; set it to 0")
    if hf.quantization is not None:
        out.append(
            f"{source}: quantised weights cannot be trained; use the full-precision ones (`dppo-megatron convert "
            "hf-to-hf` writes them from block-scaled FP8 and MXFP4)"
        )
    if hf.rope_type == "yarn":
        problems = _yarn_problems(scaling) if hf.mla else _own_yarn_problems(scaling)
        out += [f"{source}: {problem}" for problem in problems]
    if hf.moe is not None:
        out += [f"{source}: {problem}" for problem in _routing_problems(hf.moe)]
    elif config.rollout.routing_replay:
        out.append("rollout.routing_replay = true: the model has no experts to replay; set it to false")
    return out


def _yarn_problems(scaling: Mapping[str, Any]) -> list[str]:
    """Return the settings that make Megatron's YaRN differ from transformers and the engines."""
    out = [f"rope_parameters.{name} = {scaling[name]}: Megatron-core has no such setting; models that use it are not "
           "supported" for name, default in (("attention_factor", None), ("truncate", True))
           if scaling.get(name, default) not in (None, default)]  # fmt: skip
    mscale, all_dim = scaling.get("mscale") or 0, scaling.get("mscale_all_dim") or 0
    if mscale not in (0, 1) and not all_dim:
        out.append(f"rope_parameters.mscale = {mscale}: only supported together with mscale_all_dim")
    if all_dim and not mscale:
        out.append(f"rope_parameters.mscale_all_dim = {all_dim}: only supported together with mscale")
    return out


def _own_yarn_problems(scaling: Mapping[str, Any]) -> list[str]:
    """Return the YaRN settings that `hf.rope` does not read."""
    return [f"rope_parameters.{name} = {scaling[name]}: only supported with latent attention"
            for name in ("mscale", "mscale_all_dim") if scaling.get(name)]  # fmt: skip


def _routing_problems(moe: MoEConfig) -> list[str]:
    """Return the settings that make Megatron's router differ from the router that the model was trained with."""
    out = []
    if moe.score_function == "sigmoid" and not moe.norm_topk_prob and moe.top_k > 1:
        out.append("norm_topk_prob = false: Megatron-core always rescales sigmoid scores; not supported")
    if moe.score_function == "softmax" and moe.norm_topk_prob and moe.top_k == 1:
        out.append("norm_topk_prob = true: with one expert per token its weight is always 1; routing cannot be learnt")
    if (moe.num_groups or 1) > 1 and moe.top_k != 2 * (moe.topk_groups or 0):
        out.append(
            f"topk_group = {moe.topk_groups}: Megatron-core ranks groups by the sum of their num_experts_per_tok / "
            f"topk_group best experts, transformers and engines of their 2 best; only {moe.top_k / 2:g} is supported"
        )
    return out


def _layout_problems(hf: HFModelConfig, p: ParallelConfig) -> list[str]:
    out = []
    sizes = {"attention heads": hf.num_heads}
    if hf.moe is None or not all(hf.moe.layers):
        sizes["columns of intermediate_size"] = hf.ffn_hidden_size
    if hf.mla is None:
        sizes["key-value heads"] = hf.num_kv_heads
    if hf.delta_net is not None:
        sizes["key heads of gated delta net"] = hf.delta_net.num_key_heads
    if indivisible_sizes := [f"{size} {unit}" for unit, size in sizes.items() if size % p.tensor]:
        remedy = _divisors(math.gcd(*sizes.values()))
        out.append(f"parallel.tensor = {p.tensor}: does not divide {', '.join(indivisible_sizes)}; {remedy}")
    if hf.sinks is not None and (p.expert_tensor or p.tensor) > 1:
        value = p.expert_tensor or p.tensor
        out.append(f"parallel.expert_tensor = {value}: Megatron-core does not shard experts with biases; set it to 1")
    out += _stage_problems(hf.num_layers, p)
    return out + (_dense_layout_problems(p) if hf.moe is None else _expert_layout_problems(hf.moe, p))


def _stage_problems(num_layers: int, p: ParallelConfig) -> list[str]:
    """Check that stages and virtual stages have equal numbers of layers, apart from stages that are set separately."""
    out, virtual = [], p.virtual_pipeline or 1
    settings = {"first_stage_layers": p.first_stage_layers, "last_stage_layers": p.last_stage_layers}
    stages = {name: layers for name, layers in settings.items() if layers}
    for name, layers in stages.items():
        if layers % virtual:
            out.append(f"parallel.{name} = {layers}: {virtual} virtual stages do not divide it")
    layers, ranks = num_layers - sum(stages.values()), p.pipeline - len(stages)
    if layers < 0 or (ranks <= 0 and layers):
        total = " + ".join(map(str, stages.values()))
        out.append(f"parallel.{' + parallel.'.join(stages)} = {total}: does not leave {ranks} stages their part of "
                   f"{num_layers} layers")  # fmt: skip
    elif ranks > 0 and (layers == 0 or layers % (ranks * virtual)):
        remedy = "" if stages else "; set parallel.last_stage_layers, or change it"
        out.append(f"parallel.pipeline = {p.pipeline}: {ranks * virtual} stages do not divide {layers} layers{remedy}")
    return out


def _dense_layout_problems(p: ParallelConfig) -> list[str]:
    out = []
    if p.expert > 1:
        out.append(f"parallel.expert = {p.expert}: the model has no experts; set it to 1")
    if p.expert_tensor not in (None, p.tensor):
        out.append(f"parallel.expert_tensor = {p.expert_tensor}: the model has no experts; remove it")
    return out


def _expert_layout_problems(moe: MoEConfig, p: ParallelConfig) -> list[str]:
    out = []
    expert_tensor = p.expert_tensor or p.tensor
    if moe.num_experts % p.expert:
        out.append(f"parallel.expert = {p.expert}: does not divide {moe.num_experts} experts; "
                   f"{_divisors(moe.num_experts)}")  # fmt: skip
    if moe.ffn_hidden_size % expert_tensor:
        out.append(
            f"parallel.expert_tensor = {expert_tensor}: does not divide moe_intermediate_size = {moe.ffn_hidden_size}"
        )
    if moe.shared_ffn_hidden_size % p.tensor:
        out.append(
            f"parallel.tensor = {p.tensor}: does not divide the {moe.shared_ffn_hidden_size} columns of the shared "
            "experts"
        )
    if p.tensor > 1 and not p.sequence:
        out.append("parallel.sequence = false: a model with experts needs it where parallel.tensor > 1; set it to true")
    if p.expert_dispatcher == "allgather" and p.pipeline > 1:
        out.append(
            "parallel.expert_dispatcher = allgather: Megatron-core cannot combine it with packed micro-batches in a "
            "pipeline; use alltoall"
        )
    return out


def _divisors(size: int) -> str:
    return "use one of " + ", ".join(str(d) for d in range(1, size + 1) if size % d == 0)
