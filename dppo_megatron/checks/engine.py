"""Rules of `engine` and `weight_sync`: where engines run, how weights reach them, what they compute in."""

from __future__ import annotations

from dppo_megatron.config import Config

LAST_PORT = 65535
OF_ONE_MACHINE = ("/dev/shm", "/run", "/tmp")
MOST_LORA_RANK = 512  # of a vLLM server
MOST_SENDERS = 32  # of broadcast weights: a communicator for each, with buffers of its own in every engine worker


def problems(config: Config) -> list[str]:
    if config.objective.supervised:
        return []
    e = config.engine
    out = []
    if e.urls and e.count != 1 and e.count != len(e.urls):
        out.append(f"engine.count = {e.count}: engine.urls names {len(e.urls)} engines; remove engine.count")
    if e.port + config.started_engines - 1 > LAST_PORT:
        out.append(
            f"engine.port = {e.port}: with engine.count = {e.count} the last port would be "
            f"{e.port + config.started_engines - 1}, above {LAST_PORT}; set it to a lower one, or to 0 for free ones"
        )
    if e.kind != "sglang" and not e.seeded:
        out.append(f"engine.seeded = false: {e.kind} gives every request its seed at no such price; remove it")
    if e.placement == "colocated":
        out += _colocated(config)
    parts = (_layout, _transport, _directory, _deltas, _quantization, _adapters)
    return out + [problem for part in parts for problem in part(config)]


def _layout(config: Config) -> list[str]:
    """Of an engine's own GPUs."""
    e, out = config.engine, []
    if e.devices % e.nodes:
        out.append(
            f"engine.nodes = {e.nodes}: does not divide an engine's {e.devices} GPUs (engine.tensor_parallel x "
            "engine.pipeline_parallel); change one of them"
        )
    if e.pipeline_parallel == 1:
        return out
    what = f"engine.pipeline_parallel = {e.pipeline_parallel}"
    why_not = (
        (e.kind == "sglang", "SGLang numbers workers of a broadcast within their stage (engine.kind = sglang)"),
        (config.rollout.routing_replay, "vLLM returns no experts from several stages (rollout.routing_replay = true)"),
        (config.weight_sync.lora == "adapter", "adapters were not tried in stages (weight_sync.lora = adapter)"),
    )
    return out + [f"{what}: {why}; set it to 1 and use engine.tensor_parallel" for is_so, why in why_not if is_so]


def _colocated(config: Config) -> list[str]:
    e = config.engine
    out = []
    if config.weight_sync.transport == "broadcast":
        out.append(
            "weight_sync.transport = broadcast: NCCL does not connect two processes on one GPU, as with "
            "engine.placement = colocated; set it to shared_storage (a run directory in memory is as fast)"
        )
    if e.urls:
        out.append("engine.urls: colocated engines are started by the run, on the trainer's GPUs; remove one of them")
    return out


def _transport(config: Config) -> list[str]:
    senders = config.parallel.pipeline * config.parallel.expert
    if not config.samples or config.weight_sync.transport != "broadcast" or senders <= MOST_SENDERS:
        return []
    return [
        f"weight_sync.transport = broadcast: parallel.pipeline x parallel.expert = {senders} ranks send weights, "
        f"and every engine worker would be in a group with each of them (at most {MOST_SENDERS}); set it to "
        "shared_storage"
    ]


def _directory(config: Config) -> list[str]:
    w, nodes = config.weight_sync, config.slurm.trainer_nodes + config.slurm.engine_nodes
    if not config.samples or w.directory is None:
        return []
    what, remedy = f"weight_sync.directory = {w.directory}", "remove it"
    here = next((root for root in OF_ONE_MACHINE if w.directory.absolute().is_relative_to(root)), None)
    why_not = (
        (w.transport == "broadcast", "a broadcast writes nothing (weight_sync.transport = broadcast)"),
        (here is not None and nodes > 1, f"{here} is each machine's own, and the run is to have {nodes} nodes"),
    )
    return [f"{what}: {why}; {remedy}" for is_so, why in why_not if is_so]


def _deltas(config: Config) -> list[str]:
    w = config.weight_sync
    if not config.samples or w.full_every == 1:
        return []
    what, remedy = f"weight_sync.full_every = {w.full_every}", "set it to 1"
    why_not = (
        (
            w.transport == "broadcast",
            "a broadcast is of the whole, for ranks and engine workers keep no copy of the version before on their "
            "hosts (weight_sync.transport = broadcast)",
        ),
        (w.lora == "adapter", "adapters are published as they are (weight_sync.lora = adapter)"),
        (
            config.engine.placement == "colocated",
            "where engines do not take what changed, the whole is written again, from an actor that has left its "
            "device for them (engine.placement = colocated)",
        ),
    )
    return [f"{what}: {why}; {remedy}" for is_so, why in why_not if is_so]


def _quantization(config: Config) -> list[str]:
    e = config.engine
    if not e.serves_fp8:
        return []
    out = []
    if e.dtype == "fp32":
        out.append(
            f"engine.dtype = fp32: what engine.quantization = {e.quantization} leaves as it is must be bf16 or fp16; "
            "set engine.dtype to bf16"
        )
    if e.urls and e.kind == "sglang":
        out.append(
            f"engine.quantization = {e.quantization}: not with engine.urls of SGLang servers, whose weights are "
            "checked against a model that the run makes for engines it starts; let it start them, or use vllm"
        )
    return out


def _adapters(config: Config) -> list[str]:
    if not config.samples or config.weight_sync.lora == "merged":
        return []
    e, m, what, remedy = config.engine, config.model, "weight_sync.lora = adapter", "set it to merged"
    why_not = (
        (not m.lora.r, "the run trains no adapters (model.lora.r = 0)"),
        (m.lora.r > MOST_LORA_RANK, f"engines take adapters of r at most {MOST_LORA_RANK} (model.lora.r = {m.lora.r})"),
        (
            e.quantization != "none",
            f"FP8 weights are made at each publish (engine.quantization = {e.quantization})",
        ),
        (e.placement == "colocated", "engines that sleep give their weights back (engine.placement = colocated)"),
        (config.weight_sync.transport == "broadcast", "adapters travel as files (weight_sync.transport = broadcast)"),
        (m.weights is not None, "engines start from model.path, the trainer from model.weights"),
    )
    return [f"{what}: {why}; {remedy}" for is_so, why in why_not if is_so]
