"""Checks `rollout` and `eval`: log-probs must belong to the sampled distribution, and samples must fit the engine."""

from __future__ import annotations

from collections.abc import Iterator

from dppo_megatron.config import Config
from dppo_megatron.config.task import HELDOUT
from dppo_megatron.rollout.engines.kinds import kind_of
from dppo_megatron.rollout.rewards import reward_range


def problems(config: Config) -> Iterator[str]:
    yield from eval_problems(config)
    if config.rollout.dynamic_sampling and config.objective.advantage == "batch_mean":
        yield (
            "rollout.dynamic_sampling = true: objective.advantage = batch_mean uses the mean reward of all samples "
            "and learns from groups of equal rewards, which would be dropped; set it to false, or choose a group "
            "advantage"
        )
    if not config.objective.supervised:
        yield from (*_distribution(config), *_staleness(config), *lengths(config))


def _distribution(config: Config) -> Iterator[str]:
    r, e = config.rollout, config.engine
    if r.top_p == 0:
        yield "rollout.top_p = 0.0: no token is left to draw from; set it above 0, to 1 for all tokens"
    if r.min_p == 1 or 0 < r.top_p * r.top_k <= 1:  # the most likely of k tokens has at least 1 / k
        mask = f"rollout.top_k = {r.top_k}, top_p = {r.top_p:g}, min_p = {r.min_p:g}"
        yield f"{mask}: keep only the most likely token, so all samples of a group are equal; allow more tokens"
    if r.has_sampling_mask and r.top_k <= 0:
        name, value = ("top_p", r.top_p) if r.top_p < 1 else ("min_p", r.min_p)
        yield (
            f"rollout.{name} = {value}: on a flat distribution it keeps most of the vocabulary at every position; "
            "limit it by rollout.top_k, e.g. 1000 (vLLM requires that too)"
        )
    if e.logprobs_mode != "processed_logprobs":
        yield (
            f"engine.logprobs_mode = {e.logprobs_mode}: raw log-probs ignore the temperature, so they are not those "
            "of the distribution that was sampled; set engine.logprobs_mode to processed_logprobs"
        )
    if r.topk_logprobs > e.max_logprobs:
        setting = f"rollout.topk_logprobs = {r.topk_logprobs}"
        yield f"{setting}: above the engine's cap engine.max_logprobs = {e.max_logprobs}; lower K or raise the cap"


def _staleness(config: Config) -> Iterator[str]:
    r = config.rollout
    if config.engine.placement == "colocated" and r.max_staleness:
        yield (
            f"rollout.max_staleness = {r.max_staleness}: with engine.placement = colocated engines sleep while the "
            "trainer trains, so nothing is sampled ahead; set it to 0 or give the engines GPUs of their own"
        )
    waits, request = config.weight_sync.timeout_s, config.engine.request_timeout_s
    if r.on_update == "wait" and request is not None and request > waits:
        yield (
            f"rollout.on_update = wait: an update waits weight_sync.timeout_s = {waits:g} s for requests, which "
            f"may take engine.request_timeout_s = {request:g} s; raise the former, or set on_update to keep or abort"
        )


def lengths(config: Config) -> Iterator[str]:
    """Yield a problem if the response length does not fit the engine."""
    room = config.engine.max_model_len
    if config.samples and (longest := config.too_long(room)):
        yield (
            f"engine.max_model_len = {room}: less than {longest}, so responses to long prompts would be truncated; "
            "remove it, or lower one of those"
        )


def eval_problems(config: Config) -> Iterator[str]:
    yield from kind_of(config).eval_problems(config)
    if HELDOUT in config.eval.sets:
        yield f"eval.sets.{HELDOUT}: this name is reserved for data.eval; choose another"
    for name, eval_set in config.eval_sets.items():
        low, high = reward_range(eval_set.reward or config.reward)
        if config.environment.source is None and not low < eval_set.pass_reward <= high + 1e-6:
            setting = f"eval.{'' if name == HELDOUT else f'sets.{name}.'}pass_reward = {eval_set.pass_reward:g}"
            yield f"{setting}: rewards are {low:g} to {high:g}, so either no answer or all are right; set it between"
    for name, eval_set in config.eval.sets.items():
        setting = f"eval.sets.{name}"
        if 0 < eval_set.temperature < 0.01:
            yield f"{setting}.temperature = {eval_set.temperature:g}: vLLM raises it to 0.01; set it to that or to 0"
        if eval_set.temperature == 0 and eval_set.n > 1:
            yield (
                f"{setting}.n = {eval_set.n}: with {setting}.temperature = 0 all answers are equal; change one of them"
            )
        if eval_set.temperature == 0 and eval_set.top_p < 1:
            yield f"{setting}.top_p = {eval_set.top_p:g}: greedy answers do not depend on it; remove it"
        if eval_set.reward is not None and eval_set.reward.overlong_buffer:
            buffer = f"{setting}.reward.overlong_buffer = {eval_set.reward.overlong_buffer}"
            yield f"{buffer}: it shapes only rewards of training; remove it"
