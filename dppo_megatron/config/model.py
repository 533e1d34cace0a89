"""The sections `model`, `parallel`, `optimizer`, `train` and `acceptance`: the policy and its updates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dppo_megatron.common.dtypes import FloatName

from .section import Count, CountFromZero, FilePath, Float, Positive, Processes, Seconds, Section, refusal

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraConfig(Section):
    r: CountFromZero = Field(0, description="rank of the adapters; 0 = no adapters, all weights are trained")
    alpha: Positive = Field(16.0, description="an adapter is scaled by alpha / r")
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        LINEAR,
        min_length=1,
        description="linear layers with an adapter, by the last parts of their Hugging Face names, as in PEFT",
    )
    adapter: FilePath | None = Field(
        None, description="start from this directory in PEFT's format; default: an adapter that changes nothing"
    )


class ModelConfig(Section):
    path: FilePath = Field(description="Hugging Face model directory (config.json, safetensors, tokenizer)")
    weights: FilePath | None = Field(
        None,
        description="start from a Megatron checkpoint of the same model instead: from `convert`, or a run's "
        "checkpoints/step-N, of any layout",
    )
    dtype: FloatName = Field("bf16", description="parameters and activations; the optimizer is fp32")
    logits: Literal["stored", "fused"] = Field(
        "stored", description="stored: keep the head's output for the loss; fused: one pass, less memory"
    )
    recompute: Literal["none", "selective", "full"] = Field("none", description="activation recompute")
    fp8: Literal["none", "tensorwise", "blockwise", "mxfp8"] = Field(
        "none", description="TransformerEngine's FP8 recipe for the layers' matrix products; needs bf16 and a GPU"
    )
    fp32_head: bool = Field(False, description="compute logits in fp32 for any dtype; stored logits only")
    batch_invariant_head: bool = Field(
        False, description="log-probs depend only on the token's hidden state, not on the packing"
    )
    layers: Literal["auto", "local", "transformer_engine"] = Field(
        "auto", description="auto = TransformerEngine on CUDA where installed, else local"
    )
    router_dtype: Literal["fp32", "model"] = Field(
        "fp32", description="MoE: precision of router scores and expert weights; model = that of `dtype`"
    )
    lora: LoraConfig = LoraConfig()

    @property
    def start(self) -> Path:
        """Path of the start weights."""
        return self.weights or self.path

    @property
    def computes_in(self) -> str:
        """Name of the dtype of the layers' matrix products."""
        return self.dtype if self.fp8 == "none" else "fp8"


class ParallelConfig(Section):
    world_size: Processes = Field(1, description="trainer ranks; data-parallel size follows from the rest")
    tensor: Processes = Field(1, description="ranks that share every layer's matrices")
    pipeline: Processes = Field(1, description="stages into which the layers are split")
    virtual_pipeline: Count | None = Field(None, ge=2, description="model chunks per pipeline rank (interleaved)")
    first_stage_layers: Count | None = Field(
        None, description="layers of the first pipeline rank; default: as the others"
    )
    last_stage_layers: Count | None = Field(None, description="layers of the last pipeline rank, likewise")
    context: Processes = Field(1, description="ranks that share every sequence")
    expert: Processes = Field(1, description="MoE: ranks that share the experts of a layer")
    expert_tensor: Processes | None = Field(None, description="tensor parallelism of the experts; default: tensor")
    expert_dispatcher: Literal["alltoall", "allgather"] = Field(
        "alltoall", description="transport of tokens to other ranks' experts; allgather suits few experts per rank"
    )
    sequence: bool = Field(False, description="sequence parallelism; needs tensor > 1")
    distributed_optimizer: bool = Field(True, description="shard optimizer state over data-parallel ranks")
    overlap: bool | None = Field(
        None,
        description="reduce gradients during the backward pass, and between updates of a step gather parameters during "
        "the forward pass; default: on CUDA",
    )
    timeout_s: Seconds = Field(600.0, description="a collective that takes longer raises")


LARGEST = 2.0**32


def _power_of_two(value: float) -> float:
    if math.frexp(value)[0] != 0.5:
        raise refusal("must be a power of two, so that scaling changes no bit of a gradient")
    return value


Scale = Annotated[Float, Field(ge=2.0**-24, le=LARGEST), AfterValidator(_power_of_two)]


class LossScaleConfig(Section):
    """The loss scale of `model.dtype: fp16`, whose numbers range from 6e-8 to 65504."""

    initial: Scale = Field(2.0**16, description="loss scale of the first update; a power of two")
    growth_interval: Count = Field(400, description="consecutive updates without overflow that double the scale")
    smallest: Scale = Field(1.0, description="lower limit, to which overflows halve the scale; a power of two")


class OptimizerConfig(Section):
    lr: Positive = Field(1e-6, description="learning rate of Adam; adapters and tiny models need 1e-4 to 1e-3")
    min_lr: Float = Field(0.0, ge=0, le=1e6, description="learning rate at which a decay ends")
    warmup_updates: CountFromZero = Field(0, description="optimizer updates of linear warm-up")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="of lr, down to min_lr at the end")
    weight_decay: Float = Field(0.0, ge=0, le=1e6, description="decoupled, as in AdamW")
    beta1: Float = Field(0.9, ge=0, lt=1, description="Adam's decay of the mean of gradients")
    beta2: Float = Field(0.95, ge=0, lt=1, description="Adam's decay of the mean of their squares")
    eps: Float = Field(1e-8, ge=1e-30, le=1, description="a smaller value is 0 in fp32 and gives 0 / 0")
    grad_clip: Float = Field(1.0, ge=0, le=1e12, description="global gradient norm; 0 = off")
    offload: bool = Field(
        False,
        description="keep main parameters and Adam states on the host; each optimizer step moves them to the GPU and "
        "back",
    )
    max_skipped_in_a_row: Count = Field(
        5,
        description="stop after this many updates skipped for non-finite gradients, in which no smaller loss scale "
        "helps",
    )
    loss_scale: LossScaleConfig = LossScaleConfig()


class TrainConfig(Section):
    steps: Count = Field(description="rollout batches to train on (policy versions)")
    updates_per_step: Count = Field(1, description="optimizer updates per rollout batch")
    micro_batch_tokens: Count = Field(8192, description="packed tokens per forward-backward on one rank")
    share_prefixes: bool | None = Field(
        None, description="samples in one micro-batch share their prompt's computation; default: where the layers can"
    )


class AcceptanceConfig(Section):
    """A bound on the divergence of a step. Without it nothing is measured, and no weight is copied."""

    bound: Positive | None = Field(
        None, description="largest divergence of the policy that a step may publish; null = off"
    )
    divergence: Literal["objective", "binary_tv", "binary_kl"] = Field(
        "objective", description="the objective's divergence from its anchor, or a divergence from mu"
    )
    statistic: Literal["mean", "max"] = Field("mean", description="over the measured tokens with loss")
    share: Annotated[Float, Field(gt=0, le=1)] = Field(
        0.1, description="share of micro-batches to measure, chosen by run.seed and step; at least one"
    )
    halvings: CountFromZero = Field(
        5, description="beyond the bound: halvings of the step before it is undone; 0 = undone at once"
    )
    learning_rate: Literal["follow", "keep"] = Field(
        "follow",
        description="after a step that is not fully kept: follow = scale later updates by the part that was kept, "
        "growing again with each step within half the bound; keep = do not scale them",
    )
    moments: Literal["keep", "reset"] = Field("keep", description="Adam's moments after a step that is not fully kept")
