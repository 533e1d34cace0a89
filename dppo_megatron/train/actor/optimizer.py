"""Builds Megatron's optimizer and learning-rate schedule, and runs steps, skipping non-finite gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from dppo_megatron.config.schema import Config

from .loss_scale import LossScale
from .model import PolicyModel
from .model_config import dtype, overlaps_communication


@dataclass(frozen=True)
class UpdateResult:
    """Reports an optimizer step: norm of the summed gradients before clipping, and the applied learning rate."""

    grad_norm: float
    lr: float
    skipped: bool  # gradients or logits were not finite; nothing changed
    overflowed: bool  # gradients exceeded fp16 at this scale, so the update was skipped and the scale halved


def wrap_data_parallel(
    chunks: list[PolicyModel], transformer: TransformerConfig, config: Config
) -> list[DistributedDataParallel]:
    """Wrap chunks in Megatron's DDP: fp32 gradient buffers, summed, not averaged, over data and context parallel ranks.

    With `parallel.overlap` gradients are reduced during the backward pass, and `ParameterGather` decides when new
    parameters of the distributed optimizer are gathered.
    """
    overlap = overlaps_communication(config)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and config.parallel.distributed_optimizer,
    )
    model = [
        DistributedDataParallel(transformer, settings, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if overlap:  # the schedules then reduce only in the last micro-batch's backward pass
        waits = [chunk.no_sync for chunk in model]
        transformer.no_sync_func = waits if len(waits) > 1 else waits[0]
    return model


def build_optimizer(model: list[DistributedDataParallel], config: Config) -> MegatronOptimizer:
    """Build AdamW (TransformerEngine's, else apex's, else torch's) with fp32 main parameters; norms are not decayed."""
    o = config.optimizer
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=o.lr,
        min_lr=o.min_lr,
        weight_decay=o.weight_decay,
        adam_beta1=o.beta1,
        adam_beta2=o.beta2,
        adam_eps=o.eps,
        clip_grad=o.grad_clip,
        bf16=config.model.dtype == "bf16",
        fp16=config.model.dtype == "fp16",
        params_dtype=dtype(config),
        use_distributed_optimizer=config.parallel.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(settings, model, use_gloo_process_groups=False)
    if not torch.cuda.is_available():
        for group in optimizer.param_groups:
            group["fused"] = True  # torch's fused Adam reads and writes the state once, not in each of nine operators
    return optimizer


def build_schedule(optimizer: MegatronOptimizer, config: Config) -> OptimizerParamScheduler:
    """Build a linear warm-up over `warmup_updates` (update i applies lr (i + 1) / warmup), then the decay.

    The decay ends at `min_lr` with the last update of `optimizer.decay_steps`, by default the last update of the run.
    """
    o = config.optimizer
    updates = (o.decay_steps or config.train.steps) * config.train.updates_per_step
    return OptimizerParamScheduler(
        optimizer,
        init_lr=o.lr / max(1, o.warmup_updates),
        max_lr=o.lr,
        min_lr=o.min_lr,
        # num_steps counts completed updates; the schedule sets the lr of the next update.
        lr_warmup_steps=max(0, o.warmup_updates - 1),
        lr_decay_steps=max(updates - 1, o.warmup_updates, 1),
        lr_decay_style=o.decay,
        start_wd=o.weight_decay,
        end_wd=o.weight_decay,
        wd_incr_steps=updates,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )


def optimizer_step(
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    *,
    clip: float,
    lr_scale: float = 1.0,
    refuse: bool = False,
    loss_scale: LossScale | None = None,
) -> UpdateResult:
    """Clip to the global norm, step, and advance the schedule, or skip all three if the norm is not finite.

    All ranks must call this function, and they take the same decision.

    lr_scale: multiplies the schedule's rate for this step.
    refuse: skip all three as well, for a reason that the caller found before the gradients.
    loss_scale: the factor that gradients still have. Overflows and applied steps update the scale; refused steps and
    other skipped steps do not.
    """
    lr = learning_rate(optimizer) * lr_scale
    found_inf = optimizer.prepare_grads()  # divides the gradients by the loss scale
    grad_norm = float(optimizer.get_grad_norm())
    if refuse or found_inf or not math.isfinite(grad_norm):
        overflowed = False
        if loss_scale is not None and found_inf and not refuse:
            overflowed = loss_scale.can_fall
            loss_scale.follow(overflow=True)
        return UpdateResult(grad_norm, lr, skipped=True, overflowed=overflowed)
    if loss_scale is not None:
        loss_scale.follow(overflow=False)
    if clip > 0:
        # Megatron's step() clips the same way, but has no hook between the norm and the update.
        norm = torch.tensor(grad_norm, dtype=torch.float64)
        for part in optimizer.chained_optimizers:
            torch.nn.utils.clip_grads_with_norm_(part.get_parameters(), clip, norm)
    for group in optimizer.param_groups:
        group["lr"] *= lr_scale
    optimizer.step_with_ready_grads()
    schedule.step(1)  # sets the rate of every group again
    return UpdateResult(grad_norm, lr, skipped=False, overflowed=False)


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """Return the schedule's rate for the next update."""
    return float(optimizer.param_groups[0]["lr"])
