"""Rules of a training step: its batches, the rewards of long responses, the learning rate."""

from __future__ import annotations

from dppo_megatron.config import Config
from dppo_megatron.config.model import AcceptanceConfig


def problems(config: Config) -> list[str]:
    t, r = config.train, config.rollout
    out = []
    if r.prompts_per_step % t.updates_per_step:
        out.append(
            f"train.updates_per_step = {t.updates_per_step}: does not divide rollout.prompts_per_step = "
            f"{r.prompts_per_step}; an update trains on whole groups"
        )
    per_update = r.prompts_per_step * r.group_size // t.updates_per_step
    if 0 < per_update < config.data_parallel:  # 0: updates_per_step is too large
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
    if absent := [rank for rank in config.profile.ranks if rank >= config.parallel.world_size]:
        size = config.parallel.world_size
        out.append(f"profile.ranks = {absent}: parallel.world_size = {size} has no such ranks; remove them")
    out += _credit(config)
    if config.checkpoint.keep_rollouts is not None and not config.samples:
        out.append(
            f"checkpoint.keep_rollouts = {config.checkpoint.keep_rollouts}: the run samples nothing, and deletes "
            "nothing of what others sampled; remove it"
        )
    if config.optimizer.min_lr > config.optimizer.lr:
        out.append(f"optimizer.min_lr = {config.optimizer.min_lr}: above optimizer.lr = {config.optimizer.lr}")
    return out


def _credit(config: Config) -> list[str]:
    """That turns can have rewards, and that nothing takes those of trajectories for all there is."""
    o = config.objective
    if o.credit == "trajectory":
        needless = f"objective.discount = {o.discount:g}: it is of returns from a turn on; set objective.credit to turn"
        return [needless] if o.discount != 1 else []
    out = []
    if config.objective.supervised or (config.samples and config.environment.name is None):
        out.append(
            "objective.credit = turn: the method `step` of an environment gives rewards of turns, and environment.name "
            "names none; set that, or credit to trajectory"
        )
    if o.advantage.startswith("batch"):
        out.append(
            f"objective.advantage = {o.advantage}: is over the batch, and objective.credit = turn compares turns of a "
            "group; use group_mean, group_mean_std or leave_one_out"
        )
    if config.rollout.dynamic_sampling:
        out.append(
            "rollout.dynamic_sampling = true: drops groups of equal rewards, whose turns objective.credit = turn may "
            "tell apart; set it to false"
        )
    return out
