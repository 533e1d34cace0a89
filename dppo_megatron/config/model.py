"""Defines the sections `model`, `parallel`, `optimizer`, `train` and `acceptance`: the policy and its updates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from dppo_megatron.common.dtypes import FloatName

from .section import Count, CountFromZero, FilePath, Float, Positive, Processes, Seconds, Section, refusal, setting

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _layer_names(value: Any) -> Any:
    if value in ("all-linear", ["all-linear"]):
        raise refusal("all linear layers, PEFT's all-linear, have adapters by default; remove the setting")
    return value


class LoraConfig(Section):
    r: CountFromZero = setting(0, "rank of the adapters; 0 = no adapters, all weights are trained")
    alpha: Positive = setting(16.0, "an adapter is scaled by alpha / r")
    targets: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_layer_names)] = setting(
        LINEAR,
        "linear layers with an adapter, by the last parts of their Hugging Face names, as in PEFT",
        min_length=1,
    )
    adapter: FilePath | None = setting(
        None, "start from this directory in PEFT's format; default: an adapter that changes nothing"
    )


class ModelConfig(Section):
    path: FilePath = Field(description="Hugging Face model directory (config.json, safetensors, tokenizer)")
    weights: FilePath | None = setting(
        None,
        "start from a Megatron checkpoint of the same model instead: from `convert`, or a run's checkpoints/step-N, "
        "of any layout",
    )
    dtype: FloatName = setting("bf16", "parameters and activations; the optimizer is fp32")
    logits: Literal["stored", "fused"] = setting(
        "stored", "stored: keep the head's output for the loss; fused: one pass, less memory"
    )
    recompute: Literal["none", "selective", "full"] = setting("none", "activations to recompute in the backward pass")
    fp8: Literal["none", "tensorwise", "blockwise", "mxfp8"] = setting(
        "none", "TransformerEngine's FP8 recipe for the layers' matrix products; needs bf16 and a GPU"
    )
    fp32_head: bool = setting(False, "compute logits in fp32 regardless of dtype; needs logits = stored")
    batch_invariant_head: bool = setting(False, "log-probs depend only on the token's hidden state, not on the packing")
    layers: Literal["auto", "local", "transformer_engine"] = setting(
        "auto", "auto = TransformerEngine on CUDA where installed, else local"
    )
    router_dtype: Literal["fp32", "model"] = setting(
        "fp32", "MoE: precision of router scores and expert weights; model = that of `dtype`"
    )
    lora: LoraConfig = LoraConfig()

    @property
    def start(self) -> Path:
        """Return the path to the start weights."""
        return self.weights or self.path

    @property
    def computes_in(self) -> str:
        """Return the dtype name for the layers' matrix products."""
        return self.dtype if self.fp8 == "none" else "fp8"


class ParallelConfig(Section):
    world_size: Processes = setting(1, "trainer ranks; data-parallel size follows from the rest")
    tensor: Processes = setting(1, "ranks that share every layer's matrices")
    pipeline: Processes = setting(1, "stages into which the layers are split")
    virtual_pipeline: Count | None = setting(None, "model chunks per pipeline rank (interleaved)", ge=2)
    first_stage_layers: Count | None = setting(None, "layers of the first pipeline rank; default: as the others")
    last_stage_layers: Count | None = setting(None, "layers of the last pipeline rank; default: as the others")
    context: Processes = setting(1, "ranks that share every sequence")
    expert: Processes = setting(1, "MoE: ranks that share the experts of a layer")
    expert_tensor: Processes | None = setting(None, "tensor parallelism of the experts; default: tensor")
    expert_dispatcher: Literal["alltoall", "allgather"] = setting(
        "alltoall", "transport of tokens to other ranks' experts; allgather suits few experts per rank"
    )
    sequence: bool = setting(False, "sequence parallelism; needs tensor > 1")
    distributed_optimizer: bool = setting(True, "shard optimizer state over data-parallel ranks")
    overlap: bool | None = setting(
        None,
        "reduce gradients during the backward pass, and between updates of a step gather parameters during the "
        "forward pass; default: on CUDA",
    )
    timeout_s: Seconds = setting(600.0, "time limit of a collective")


LARGEST = 2.0**32


def _power_of_two(value: float) -> float:
    if math.frexp(value)[0] != 0.5:
        raise refusal("must be a power of two, so that scaling changes no bit of a gradient")
    return value


Scale = Annotated[Float, Field(ge=2.0**-24, le=LARGEST), AfterValidator(_power_of_two)]


class LossScaleConfig(Section):
    """Sets the loss scale for `model.dtype: fp16`, a format with numbers from 6e-8 to 65504."""

    initial: Scale = setting(2.0**16, "loss scale of the first update; a power of two")
    growth_interval: Count = setting(400, "consecutive updates without overflow that double the scale")
    smallest: Scale = setting(1.0, "lower limit, to which overflows halve the scale; a power of two")


def _adam_rate(value: float) -> float:
    if not 1e-12 <= value <= 0.1:
        raise refusal("Adam changes every weight by about lr in an update; must be 1e-12 to 0.1, e.g. 1e-6")
    return value


class OptimizerConfig(Section):
    lr: Annotated[Positive, AfterValidator(_adam_rate)] = setting(
        1e-6, "learning rate of Adam; adapters and tiny models need 1e-4 to 1e-3"
    )
    min_lr: Float = setting(0.0, "learning rate at which a decay ends", ge=0, le=1e6)
    warmup_updates: CountFromZero = setting(0, "optimizer updates of linear warm-up")
    decay: Literal["constant", "linear", "cosine"] = setting("constant", "form of the decay of lr to min_lr")
    decay_steps: Count | None = setting(None, "training step with which the decay ends; default: train.steps")
    weight_decay: Float = setting(0.0, "AdamW's decoupled weight decay", ge=0, le=10)
    beta1: Float = setting(0.9, "Adam's decay of the mean of gradients", ge=0, lt=1)
    beta2: Float = setting(0.95, "Adam's decay of the mean of their squares", ge=0, lt=1)
    eps: Float = setting(1e-8, "Adam's epsilon, which prevents 0 / 0", ge=1e-30, le=1)
    grad_clip: Float = setting(1.0, "largest global gradient norm; 0 = off", ge=0, le=1e12)
    offload: bool = setting(
        False, "keep main parameters and Adam states on the host; each optimizer step moves them to the GPU and back"
    )
    max_skipped_in_a_row: Count = setting(
        5, "stop after this many updates skipped for non-finite gradients, in which no smaller loss scale helps"
    )
    loss_scale: LossScaleConfig = LossScaleConfig()


class TrainConfig(Section):
    steps: Count = Field(description="rollout batches to train on (policy versions)")
    updates_per_step: Count = setting(1, "optimizer updates per rollout batch")
    micro_batch_tokens: Count = setting(8192, "packed tokens per forward-backward on one rank")
    share_prefixes: bool | None = setting(
        None, "samples in one micro-batch share their prompt's computation; default: where the layers can"
    )


class AcceptanceConfig(Section):
    """Bounds a step's divergence. Without a bound no divergence is measured, and no weight is copied."""

    bound: Positive | None = setting(None, "largest divergence of the policy that a step may publish; null = off")
    divergence: Literal["objective", "binary_tv", "binary_kl"] = setting(
        "objective", "the objective's divergence from its anchor, or a divergence from mu"
    )
    statistic: Literal["mean", "max"] = setting("mean", "statistic of the divergence of the measured tokens")
    share: Annotated[Float, Field(gt=0, le=1)] = setting(
        0.1, "share of micro-batches to measure, chosen by run.seed and step; at least one"
    )
    halvings: CountFromZero = setting(
        5, "beyond the bound: halvings of the step before it is undone; 0 = undone at once"
    )
    learning_rate: Literal["follow", "keep"] = setting(
        "follow",
        "after a step that is not fully kept: follow = scale later updates by the part that was kept, growing again "
        "with each step within half the bound; keep = do not scale them",
    )
    moments: Literal["keep", "reset"] = setting("keep", "Adam's moments after a step that is not fully kept")
