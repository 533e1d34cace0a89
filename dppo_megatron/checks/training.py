"""Rules of a training step: its batches, the rewards of long responses, the learning rate."""

from __future__ import annotations

from dppo_megatron.config import Config
from dppo_megatron.config.acceptance import AcceptanceConfig


def problems(config: Config) -> list[str]:
    t, r = config.train, config.rollout
    out = []
    if r.prompts_per_step % t.updates_per_step:
        out.append(
            f"train.updates_per_step = {t.updates_per_step}: does not divide rollout.prompts_per_step = "
            f"{r.prompts_per_step}; an update trains on whole groups"
        )
    per_update = r.prompts_per_step * r.group_size // t.updates_per_step
    if config.data_parallel and per_update < config.data_parallel:
        out.append(
            f"parallel.world_size = {config.parallel.world_size}: data-parallel size {config.data_parallel} exceeds "
            f"the {per_update} sequences of an update; lower it or raise rollout.prompts_per_step"
        )
    if not config.objective.supervised and r.group_size == 1:
        out.append("rollout.group_size = 1: a group of one has no baseline, so every advantage is 0; use at least 2")
    if config.reward.overlong_buffer > r.max_response_tokens:
        out.append(
            f"reward.overlong_buffer = {config.reward.overlong_buffer}: longer than rollout.max_response_tokens = "
            f"{r.max_response_tokens}; lower it"
        )
    if config.acceptance.bound is not None and config.objective.supervised:
        out.append(
            f"acceptance.bound = {config.acceptance.bound:g}: supervised training has no rollout policy to measure the "
            "policy's divergence from; remove it"
        )
    if config.acceptance.bound is None and config.acceptance != AcceptanceConfig():
        out.append(
            "acceptance.bound = null: without it the section has no effect; set it, or remove the other settings"
        )
    if config.checkpoint.keep_rollouts is not None and not config.samples:
        out.append(
            f"checkpoint.keep_rollouts = {config.checkpoint.keep_rollouts}: the run samples nothing, and deletes "
            "nothing of what others sampled; remove it"
        )
    if config.optimizer.min_lr > config.optimizer.lr:
        out.append(f"optimizer.min_lr = {config.optimizer.min_lr}: above optimizer.lr = {config.optimizer.lr}")
    return out
