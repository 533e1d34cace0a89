"""Rules between settings. Pure functions of the config: no files, no network."""

from __future__ import annotations

from .schema import Config

MOST_SENDERS = 32  # of broadcast weights: a communicator for each, with buffers of its own in every engine worker


def cross_field_violations(config: Config) -> list[str]:
    """Every broken rule in one list, each line `setting = value: why; remedy`."""
    rules = [_layout, _sampling, _batch]
    return [violation for rule in rules for violation in rule(config)]


def _layout(config: Config) -> list[str]:
    p = config.parallel
    out = []
    model_ranks = p.tensor * p.pipeline * p.context
    if p.world_size % model_ranks:
        out.append(
            f"parallel.world_size = {p.world_size}: not a multiple of tensor x pipeline x context = {model_ranks}; "
            "change one of them"
        )
    expert_ranks = (p.expert_tensor or p.tensor) * p.expert * p.pipeline
    if p.world_size % expert_ranks:
        out.append(
            f"parallel.world_size = {p.world_size}: not a multiple of expert_tensor x expert x pipeline = "
            f"{expert_ranks}; change one of them"
        )
    if p.sequence and p.tensor == 1:
        out.append("parallel.sequence = true: needs parallel.tensor > 1; set it to false")
    if p.virtual_pipeline and p.pipeline == 1:
        out.append(f"parallel.virtual_pipeline = {p.virtual_pipeline}: needs parallel.pipeline > 1; remove it")
    for name in ("first_stage_layers", "last_stage_layers"):
        if getattr(p, name) and p.pipeline == 1:
            out.append(f"parallel.{name} = {getattr(p, name)}: needs parallel.pipeline > 1; remove it")
    return out


def _sampling(config: Config) -> list[str]:
    r, e = config.rollout, config.engine
    out = []
    if r.dynamic_sampling and not config.samples:
        why = "objective.name is nll" if config.objective.supervised else "rollout.bank is given"
        out.append(f"rollout.dynamic_sampling = true: nothing is sampled ({why}); set it to false")
    if config.objective.supervised:
        return out
    if r.top_p != 1.0:
        out.append(
            f"rollout.top_p = {r.top_p}: truncated sampling removes tokens the policy still has, so every ratio "
            "would be biased; set rollout.top_p to 1"
        )
    if r.top_k not in (-1, 0):
        out.append(
            f"rollout.top_k = {r.top_k}: truncated sampling removes tokens the policy still has, so every ratio "
            "would be biased; set rollout.top_k to -1 (rollout.topk_logprobs is the number of listed log-probs)"
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
    if e.urls and e.count != 1 and e.count != len(e.urls):
        out.append(f"engine.count = {e.count}: engine.urls names {len(e.urls)} engines; remove engine.count")
    if e.placement == "colocated" and r.max_staleness:
        out.append(
            f"rollout.max_staleness = {r.max_staleness}: with engine.placement = colocated engines sleep while the "
            "trainer trains, so nothing is sampled ahead; set it to 0 or give the engines GPUs of their own"
        )
    if e.placement == "colocated" and config.weight_sync.transport == "broadcast":
        out.append(
            "weight_sync.transport = broadcast: NCCL does not connect two processes on one GPU, as with "
            "engine.placement = colocated; set it to shared_storage (a run directory in memory is as fast)"
        )
    if e.placement == "colocated" and e.urls:
        out.append("engine.urls: colocated engines are started by the run, on the trainer's GPUs; remove one of them")
    if e.placement == "colocated" and e.kind == "sglang":
        out.append(
            "engine.placement = colocated: only vLLM engines give the memory of weights and cache back when they "
            "sleep; set engine.kind to vllm or give the engines GPUs of their own"
        )
    senders = config.parallel.pipeline * config.parallel.expert
    if config.samples and config.weight_sync.transport == "broadcast" and senders > MOST_SENDERS:
        out.append(
            f"weight_sync.transport = broadcast: parallel.pipeline x parallel.expert = {senders} ranks own weights, "
            f"and every engine worker would be in a group with each of them (at most {MOST_SENDERS}); set it to "
            "shared_storage"
        )
    if e.quantization != "none" and e.dtype == "fp32":
        out.append(
            f"engine.dtype = fp32: what engine.quantization = {e.quantization} leaves as it is must be bf16 or fp16; "
            "set engine.dtype to bf16"
        )
    if e.quantization != "none" and e.urls and e.kind == "sglang":
        out.append(
            f"engine.quantization = {e.quantization}: not with engine.urls of SGLang servers, whose weights are "
            "checked against a model that the run makes for engines it starts; let it start them, or use vllm"
        )
    if r.max_staleness == 0 and r.beyond_bound != "wait":
        out.append(
            f"rollout.beyond_bound = {r.beyond_bound}: with rollout.max_staleness = 0 every step waits for its own "
            "groups; raise the latter or remove it"
        )
    return out + _lengths(config)


def _lengths(config: Config) -> list[str]:
    prompt, room = config.data.max_prompt_tokens, config.engine.max_model_len
    responses = {"rollout.max_response_tokens": config.rollout.max_response_tokens}
    if config.data.eval is not None and config.eval.max_response_tokens is not None:
        responses["eval.max_response_tokens"] = config.eval.max_response_tokens
    name, response = max(responses.items(), key=lambda item: item[1])
    if not config.samples or prompt + response <= room:
        return []
    return [
        f"engine.max_model_len = {room}: less than data.max_prompt_tokens = {prompt} + {name} = {response}, so "
        f"responses to long prompts would be cut short; set it to {prompt + response}, or lower one of those"
    ]


def _batch(config: Config) -> list[str]:
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
    if config.optimizer.min_lr > config.optimizer.lr:
        out.append(f"optimizer.min_lr = {config.optimizer.min_lr}: above optimizer.lr = {config.optimizer.lr}")
    return out


def slurm_violations(config: Config) -> list[str]:
    """Why the run does not fit the nodes that the `slurm` section asks for; only the Slurm commands ask."""
    s, p = config.slurm, config.parallel
    engines = config.engine.count if config.samples and not config.engine.urls else 0
    out = []
    if p.world_size % s.trainer_nodes:
        out.append(
            f"slurm.trainer_nodes = {s.trainer_nodes}: does not divide parallel.world_size = {p.world_size}; every "
            "trainer node runs the same number of ranks"
        )
    if s.engine_nodes and not engines:
        out.append(f"slurm.engine_nodes = {s.engine_nodes}: the run starts no engine; set it to 0")
    if s.engine_nodes > engines > 0:
        out.append(
            f"slurm.engine_nodes = {s.engine_nodes}: more than engine.count = {engines}, so some would idle; raise "
            "engine.count (an engine is on one node)"
        )
    if s.heterogeneous and not s.engine_nodes:
        out.append("slurm.heterogeneous = true: needs slurm.engine_nodes of at least 1; set it, or this to false")
    if not s.heterogeneous:
        for name in ("engine_gpus_per_node", "engine_partition", "engine_sbatch_args"):
            if (value := getattr(s, name)) not in (None, ()):
                out.append(f"slurm.{name} = {value}: needs slurm.heterogeneous = true; set it, or remove this")
    ranks = -(-p.world_size // s.trainer_nodes)
    serving = -(-engines // (s.engine_nodes or s.trainer_nodes)) * config.engine.tensor_parallel
    colocated = config.engine.placement == "colocated"
    if colocated and s.engine_nodes:
        out.append(
            f"slurm.engine_nodes = {s.engine_nodes}: with engine.placement = colocated engines share the trainers' "
            "GPUs; set it to 0, or engine.placement to disaggregated"
        )
    if s.engine_nodes:
        trainer_need, beside = ranks, ""
    elif colocated:
        trainer_need, beside = max(ranks, serving), f" and, colocated, engines on {serving}"
    else:
        trainer_need, beside = ranks + serving, f" and engines on {serving}"
    if 0 < s.gpus_per_node < trainer_need:
        out.append(
            f"slurm.gpus_per_node = {s.gpus_per_node}: a trainer node runs {ranks} ranks{beside}; use more nodes or "
            "fewer ranks and engines"
        )
    if s.engine_nodes and 0 < s.serving_gpus_per_node < serving:
        out.append(
            f"slurm.engine_nodes = {s.engine_nodes}: an engine node would serve on {serving} GPUs and has "
            f"{s.serving_gpus_per_node}; use more nodes, or lower engine.count or engine.tensor_parallel"
        )
    return out + _need_gpus(config, engines)


def _need_gpus(config: Config, engines: int) -> list[str]:
    """Settings that need a GPU, on nodes that are asked for without."""
    m, s, quantization = config.model, config.slurm, config.engine.quantization
    trains, serves = s.gpus_per_node > 0, s.serving_gpus_per_node > 0
    refused = {
        f"model.fp8 = {m.fp8}": m.fp8 != "none" and not trains,
        f"model.layers = {m.layers}": m.layers == "transformer_engine" and not trains,
        f"engine.quantization = {quantization}": quantization != "none" and engines > 0 and not serves,
    }
    why = "needs GPUs, and its nodes have none; set slurm.gpus_per_node (engine_gpus_per_node), or change this"
    return [f"{setting}: {why}" for setting, wrong in refused.items() if wrong]
