"""Checks training: rank groups, precision, batches, and the learning rate."""

from __future__ import annotations

import os
from collections.abc import Iterator

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.config import Config
from dppo_megatron.config.task import HELDOUT


def problems(config: Config) -> Iterator[str]:
    t, r = config.train, config.rollout
    yield from _layout(config)
    yield from _precision(config)
    if r.prompts_per_step % t.updates_per_step:
        updates = f"train.updates_per_step = {t.updates_per_step}: does not divide rollout.prompts_per_step"
        yield f"{updates} = {r.prompts_per_step}; an update trains on whole groups"
    per_update = r.prompts_per_step * r.group_size // t.updates_per_step
    if 0 < per_update < config.data_parallel:  # 0: updates_per_step is too large
        cause = f"data-parallel size {config.data_parallel} exceeds the {per_update} sequences of an update"
        yield f"parallel.world_size = {config.parallel.world_size}: {cause}; lower it or raise rollout.prompts_per_step"
    if not config.objective.supervised and r.group_size == 1 and not config.distillation.teachers:
        yield "rollout.group_size = 1: a group of one has no baseline, so every advantage is 0; use at least 2"
    if not (config.distillation.teachers or any(term.weight for term in config.reward.all_terms)):
        yield "reward.terms: all weights are 0, so every reward is 0; set one to another number"
    a, o = config.acceptance, config.objective
    if (a.bound or 0) >= 1 and (o.divergence if a.divergence == "objective" else a.divergence).endswith("_tv"):
        yield f"acceptance.bound = {a.bound:g}: a total variation is at most 1, so no step is beyond it; lower it"
    if config.reward.overlong_buffer > r.max_response_tokens:
        buffer = f"reward.overlong_buffer = {config.reward.overlong_buffer}"
        yield f"{buffer}: longer than rollout.max_response_tokens = {r.max_response_tokens}; lower it"
    if absent := [rank for rank in config.profile.ranks if rank >= config.parallel.world_size]:
        size = config.parallel.world_size
        yield f"profile.ranks = {absent}: parallel.world_size = {size} has no such ranks; remove them"
    if late := [step for step in config.profile.steps if step > t.steps]:
        yield f"profile.steps = {late}: the run has only train.steps = {t.steps}; remove them"
    yield from _credit(config)
    yield from _learning_rate(config)
    trained = {os.path.realpath(path) for path, _ in config.data.train_files}
    for name, one in config.eval_sets.items():
        if os.path.realpath(one.path) in trained and config.environment.source is None:  # it may draw other tasks
            setting = "data.eval" if name == HELDOUT else f"eval.sets.{name}.path"
            yield f"{setting} = {one.path}: the run trains on this file, so nothing is held out; name another"


def _learning_rate(config: Config) -> Iterator[str]:
    o, steps, decays = config.optimizer, config.train.steps, config.optimizer.decay != "constant"
    end = min(steps, o.decay_steps or steps) if decays else steps
    updates = end * config.train.updates_per_step
    if decays and o.min_lr >= o.lr:
        yield f"optimizer.min_lr = {o.min_lr}: not below optimizer.lr = {o.lr}; lower it"
    if o.warmup_updates > updates - (decays and updates > 1):
        longer = f"longer than the {updates} updates until the decay ends, and the last one must decay"
        longer = longer if decays else f"longer than the run of {updates} updates"
        yield f"optimizer.warmup_updates = {o.warmup_updates}: {longer}; lower it"
    if end < steps and not o.min_lr:
        reason = "the learning rate is 0 in the steps after it; set optimizer.min_lr, or make both equal"
        yield f"optimizer.decay_steps = {end}: less than train.steps = {steps}, and {reason}"


def _credit(config: Config) -> Iterator[str]:
    """Yield why turns cannot have rewards, and settings that would ignore turn rewards."""
    o = config.objective
    if o.credit == "trajectory":
        return
    if config.objective.supervised or (config.samples and config.environment.name is None):
        yield (
            "objective.credit = turn: the method `step` of an environment gives rewards of turns, and environment.name "
            "is not set; set it, or set objective.credit to trajectory"
        )
    if o.advantage.startswith("batch"):
        yield (
            f"objective.advantage = {o.advantage}: compares over the batch, but objective.credit = turn compares turns "
            "of a group; use group_mean, group_mean_std or leave_one_out"
        )
    if config.rollout.dynamic_sampling:
        yield (
            "rollout.dynamic_sampling = true: drops groups of equal rewards, but objective.credit = turn may learn "
            "from their turns; set it to false"
        )


def _layout(config: Config) -> Iterator[str]:
    p = config.parallel
    model_ranks = p.tensor * p.pipeline * p.context
    if p.world_size % model_ranks:
        size = f"parallel.world_size = {p.world_size}"
        yield f"{size}: not a multiple of tensor x pipeline x context = {model_ranks}; change one of them"
    expert_ranks = (p.expert_tensor or p.tensor) * p.expert * p.pipeline
    if p.world_size % expert_ranks and (p.expert > 1 or p.expert_tensor):  # otherwise the rule above implies it
        size = f"parallel.world_size = {p.world_size}"
        yield f"{size}: not a multiple of expert_tensor x expert x pipeline = {expert_ranks}; change one of them"


def _precision(config: Config) -> Iterator[str]:
    m = config.model
    if m.fp8 != "none" and m.dtype != "bf16":
        yield f"model.fp8 = {m.fp8}: TransformerEngine computes the rest in bf16; set model.dtype to bf16"
    if m.fp8 != "none" and m.layers == "local":
        yield f"model.fp8 = {m.fp8}: local layers have no FP8; set model.layers to transformer_engine or auto"
    if m.dtype == "fp32" and m.layers == "transformer_engine":
        # FlashAttention and cuDNN need 16 bits. TransformerEngine's fallback accepts no packed sequences (up to 2.9).
        yield (
            "model.dtype = fp32: TransformerEngine has no attention kernel for packed sequences in fp32; set "
            "model.dtype to bf16 or fp16, or model.layers to local"
        )
    if m.lora.r and m.layers == "transformer_engine":
        yield f"model.lora.r = {m.lora.r}: adapters need Megatron's local layers; set model.layers to local or auto"
    if m.lora.r and m.fp8 != "none":
        yield f"model.lora.r = {m.lora.r}: local layers have no FP8; set model.fp8 to none"
    scale, name = config.optimizer.loss_scale, "optimizer.loss_scale"
    if scale.smallest > scale.initial:
        yield f"{name}.smallest = {scale.smallest:g}: is more than {name}.initial = {scale.initial:g}; lower it"
    if m.fp32_head and m.logits == "fused":
        yield "model.fp32_head = true: the fused head multiplies in model.dtype; set model.logits to stored"


def size_notes(config: Config) -> Iterator[str]:
    """Yield notes about numbers that are valid but unusually large or small."""
    if (tokens := config.train.micro_batch_tokens) < config.data.max_prompt_tokens + config.rollout.max_response_tokens:
        longer = "tokens; a longer prompt plus response gets a separate micro-batch"
        yield f"train.micro_batch_tokens = {tokens}: {longer}"
    if (limit := config.reward.timeout_s) > config.run.stall_timeout_s:
        yield f"reward.timeout_s = {limit:g}: seconds; run.stall_timeout_s ends the run before a sample fails"
    if config.model.lora.r and config.optimizer.lr < 1e-5:
        yield f"warning: optimizer.lr = {config.optimizer.lr:g}: adapters (model.lora.r) need 1e-4 to 1e-3; raise it"


def precision_notes(config: Config, *, local: bool) -> Iterator[str]:
    """Yield warnings about dtypes that disagree or, if the run computes on this machine's CPUs (`local`), are slow."""
    import torch

    trainer, engine = config.model.dtype, config.engine.dtype if config.samples else config.model.dtype
    coarser = torch.finfo(DTYPES[engine].torch).eps > torch.finfo(DTYPES[trainer].torch).eps
    if coarser and config.weight_sync.lora == "merged":
        yield (
            f"warning: engine.dtype = {engine}: rounds most of a small update of model.dtype = {trainer} away, so "
            f"engine and trainer disagree more after the first update; set it to {trainer}, or model.dtype to {engine}"
        )
    on_cpu = local and not torch.cuda.is_available() and torch.backends.mkldnn.is_available()
    if on_cpu and "fp16" in (trainer, engine) and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        name = "model.dtype" if trainer == "fp16" else "engine.dtype"
        yield f"warning: {name} = fp16: this CPU has no fp16 units, so fp16 is about 30 times as slow as bf16; use bf16"
