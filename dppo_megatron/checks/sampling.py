"""Checks `rollout` and `eval`: stored log-probs must be those of the sampled policy; samples must fit the engine."""

from __future__ import annotations

from dppo_megatron.config import Config
from dppo_megatron.config.task import HELDOUT
from dppo_megatron.engines.kinds import kind_of


def problems(config: Config) -> list[str]:
    out = eval_problems(config)
    if config.rollout.dynamic_sampling and not config.samples:
        why = "objective.name is nll" if config.objective.supervised else "rollout.bank is given"
        out.append(f"rollout.dynamic_sampling = true: nothing is sampled ({why}); set it to false")
    if config.rollout.dynamic_sampling and config.objective.advantage == "batch_mean":
        out.append(
            "rollout.dynamic_sampling = true: objective.advantage = batch_mean uses the mean reward of all samples "
            "and learns from groups of equal rewards, which would be dropped; set it to false, or choose a group "
            "advantage"
        )
    if config.objective.supervised:
        return out
    return out + _distribution(config) + _staleness(config) + lengths(config)


def _distribution(config: Config) -> list[str]:
    r, e = config.rollout, config.engine
    out = []
    if r.top_p == 0:
        out.append("rollout.top_p = 0.0: no token is left to draw from; set it above 0, to 1 for all tokens")
    if r.has_sampling_mask and r.top_k <= 0:
        name, value = ("top_p", r.top_p) if r.top_p < 1 else ("min_p", r.min_p)
        out.append(
            f"rollout.{name} = {value}: on a flat distribution it keeps most of the vocabulary at every position; "
            "limit it by rollout.top_k, e.g. 1000 (vLLM requires that too)"
        )
    if e.logprobs_mode != "processed_logprobs":
        out.append(
            f"engine.logprobs_mode = {e.logprobs_mode}: raw log-probs ignore the temperature, so they are not those "
            "of the distribution that was sampled; set engine.logprobs_mode to processed_logprobs"
        )
    if r.topk_logprobs > e.max_logprobs:
        out.append(
            f"rollout.topk_logprobs = {r.topk_logprobs}: above the engine's cap engine.max_logprobs = "
            f"{e.max_logprobs}; lower K or raise the cap"
        )
    return out


def _staleness(config: Config) -> list[str]:
    r = config.rollout
    out = []
    if config.engine.placement == "colocated" and r.max_staleness:
        out.append(
            f"rollout.max_staleness = {r.max_staleness}: with engine.placement = colocated engines sleep while the "
            "trainer trains, so nothing is sampled ahead; set it to 0 or give the engines GPUs of their own"
        )
    waits, request = config.weight_sync.timeout_s, config.engine.request_timeout_s
    if r.on_update == "wait" and request is not None and request > waits:
        out.append(
            f"rollout.on_update = wait: an update waits weight_sync.timeout_s = {waits:g} s for requests, which "
            f"may take engine.request_timeout_s = {request:g} s; raise the former, or set on_update to keep or abort"
        )
    if r.max_staleness == 0 and r.beyond_bound != "wait":
        out.append(
            f"rollout.beyond_bound = {r.beyond_bound}: with rollout.max_staleness = 0 every step waits for its own "
            "groups; raise the latter or remove it"
        )
    return out


def lengths(config: Config) -> list[str]:
    """Return a problem for a response length that does not fit the engine."""
    prompt, room = config.data.max_prompt_tokens, config.engine.max_model_len
    name, response = max(config.response_tokens.items(), key=lambda item: item[1])
    if not config.samples or prompt + response <= room:
        return []
    return [
        f"engine.max_model_len = {room}: less than data.max_prompt_tokens = {prompt} + {name} = {response}, so "
        f"responses to long prompts would be truncated; remove it for {prompt + response}, or lower one of those"
    ]


def eval_problems(config: Config) -> list[str]:
    out = kind_of(config).eval_problems(config)
    if config.eval.every and config.samples and not config.eval_sets:
        out.append(f"eval.every = {config.eval.every}: there is nothing to evaluate; set data.eval, or set it to 0")
    if HELDOUT in config.eval.sets:
        out.append(f"eval.sets.{HELDOUT}: this name is reserved for data.eval; choose another")
    for name, chosen in config.eval.sets.items():
        setting = f"eval.sets.{name}"
        if 0 < chosen.temperature < 0.01:
            out.append(
                f"{setting}.temperature = {chosen.temperature:g}: vLLM raises it to 0.01; set it to 0 (greedy) or to "
                "at least 0.01"
            )
        if chosen.temperature == 0 and chosen.n > 1:
            out.append(
                f"{setting}.n = {chosen.n}: with {setting}.temperature = 0 all answers to a prompt are the same; set "
                "n to 1 or a temperature"
            )
        if chosen.temperature == 0 and chosen.top_p < 1:
            out.append(
                f"{setting}.top_p = {chosen.top_p:g}: greedy answers do not depend on it; remove it or set a "
                "temperature"
            )
        if chosen.reward is not None and chosen.reward.overlong_buffer:
            out.append(
                f"{setting}.reward.overlong_buffer = {chosen.reward.overlong_buffer}: it shapes only rewards of "
                "training; remove it"
            )
    return out
