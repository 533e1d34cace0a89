"""Rules of `rollout`: samples are of the policy whose log-probs are kept, fit the engine, and come in time."""

from __future__ import annotations

from dppo_megatron.config import Config


def problems(config: Config) -> list[str]:
    out = []
    if config.rollout.dynamic_sampling and not config.samples:
        why = "objective.name is nll" if config.objective.supervised else "rollout.bank is given"
        out.append(f"rollout.dynamic_sampling = true: nothing is sampled ({why}); set it to false")
    if config.rollout.dynamic_sampling and config.objective.advantage == "batch_mean":
        out.append(
            "rollout.dynamic_sampling = true: objective.advantage = batch_mean takes the mean reward of all that was "
            "sampled, and learns from groups of equal rewards, which would be dropped; set it to false, or choose an "
            "advantage of groups"
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
            f"rollout.{name} = {value}: on a flat distribution it leaves most of the vocabulary, of every "
            "position to be kept; bound it by rollout.top_k, say 1000 (vLLM demands it too)"
        )
    if r.min_p > 0 and e.kind == "sglang" and e.seeded:
        out.append(
            f"rollout.min_p = {r.min_p}: SGLang draws with seeds or with min_p, and ends where it is asked for both; "
            "set engine.seeded to false, or min_p to 0"
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
    replays = r.routing_replay and config.samples
    if config.engine.kind == "sglang" and replays and r.max_staleness and r.on_update == "keep":
        out.append(
            "rollout.on_update = keep: SGLang returns the experts of a request's last prefill, which with "
            "rollout.routing_replay are not those of tokens sampled before an update; set it to abort or wait"
        )
    if r.max_staleness == 0 and r.beyond_bound != "wait":
        out.append(
            f"rollout.beyond_bound = {r.beyond_bound}: with rollout.max_staleness = 0 every step waits for its own "
            "groups; raise the latter or remove it"
        )
    return out


def lengths(config: Config) -> list[str]:
    """That every response fits the engine."""
    prompt, room = config.data.max_prompt_tokens, config.engine.max_model_len
    name, response = max(config.response_tokens.items(), key=lambda item: item[1])
    if not config.samples or prompt + response <= room:
        return []
    return [
        f"engine.max_model_len = {room}: less than data.max_prompt_tokens = {prompt} + {name} = {response}, so "
        f"responses to long prompts would be truncated; remove it for {prompt + response}, or lower one of those"
    ]
