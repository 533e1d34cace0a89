"""Checks that the run fits the nodes that `slurm` requests. Only the Slurm commands check this."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dppo_megatron.config import Config
from dppo_megatron.rollout.fleet.registry import engine_names


def server_places(config: Config) -> dict[str, tuple[range, int, int]]:
    """Return (serving nodes, first GPU on each, number of GPUs on each) by engine or teacher name.

    Serving nodes are numbered from 0. Engines fill them in turn, after the ranks' GPUs or, if colocated, on the ranks'
    GPUs. Then each teacher takes GPUs on the node with most free GPUs.
    """
    s, span = config.slurm, config.engine.nodes
    ranks = 0 if s.engine_nodes else -(-config.parallel.world_size // s.trainer_nodes)
    homes = max(span, s.engine_nodes or s.trainer_nodes)
    used_gpus, places = [0 if config.engine.placement == "colocated" else ranks] * homes, {}
    for index, name in enumerate(engine_names(config)):
        first = index % (homes // span) * span
        places[name] = range(first, first + span), used_gpus[first], config.engine.devices_per_node
        for node in places[name][0]:
            used_gpus[node] += config.engine.devices_per_node
    used_gpus = [max(ranks, gpus) for gpus in used_gpus]
    for name in config.started_teachers:
        node, gpus = used_gpus.index(min(used_gpus)), config.distillation.teachers[name].tensor_parallel
        places[f"teacher-{name}"] = range(node, node + 1), used_gpus[node], gpus
        used_gpus[node] += gpus
    return places


def problems(
    config: Config, nodes: tuple[int, ...] | None = None, gpus: int | None = None, notes: list[str] | None = None
) -> list[str]:
    """Return why the run does not fit the nodes that `slurm` requests, or why the job's nodes differ.

    `nodes` has the number of nodes per component of the running job, or is None before submission. `gpus` is the number
    of GPUs on the job's first node, if known. Adds the number of unused GPUs to `notes`.
    """
    out = list(_requested(config, [] if notes is None else notes))
    out += [] if nodes is None else _granted(config, nodes)
    if gpus is None or gpus >= (gpus_per_node := config.slurm.gpus_per_node):
        return out
    reason = (
        f"Slurm granted {gpus} GPUs on the first node; make sbatch's --gpus-per-node or --gres and the config agree"
    )
    return [*out, f"slurm.gpus_per_node = {gpus_per_node}: {reason}"]


def _granted(config: Config, nodes: tuple[int, ...]) -> list[str]:
    s = config.slurm
    if nodes in ((s.trainer_nodes, s.engine_nodes), (s.trainer_nodes + s.engine_nodes,)):
        return []
    shown = " + ".join(map(str, nodes))
    return [
        f"slurm.trainer_nodes = {s.trainer_nodes}, slurm.engine_nodes = {s.engine_nodes}: the job has {shown} nodes; "
        "make sbatch's --nodes and the config agree"
    ]


def seconds_of(time: str) -> float:
    """Convert a time limit to seconds as sbatch does: 90 and 1:30:00 are 5,400, 1-12 is 129,600."""
    days, dash, clock = time.rpartition("-")
    units = (3600, 60, 1) if dash or clock.count(":") == 2 else (60, 1)
    if not clock[0].isdigit():  # unlimited
        return math.inf
    seconds = 86400 * int(days or 0) + sum(u * int(part) for u, part in zip(units, clock.split(":"), strict=False))
    return seconds or math.inf  # for sbatch, 0 is no limit


def _requested(config: Config, notes: list[str]) -> Iterator[str]:
    s, p = config.slurm, config.parallel
    engines, teachers = config.started_engines, len(config.started_teachers)
    if seconds_of(s.time) <= s.signal_lead_s:
        longer = f"not less than slurm.time = {s.time}, so each attempt would end at once"
        yield f"slurm.signal_lead_s = {s.signal_lead_s}: {longer}; lower it, or raise slurm.time"
    if p.world_size % s.trainer_nodes:
        yield (
            f"slurm.trainer_nodes = {s.trainer_nodes}: does not divide parallel.world_size = {p.world_size}; every "
            "trainer node runs the same number of ranks"
        )
    if s.engine_nodes and not engines + teachers:
        yield f"slurm.engine_nodes = {s.engine_nodes}: the run starts no engine; set it to 0"
    span, homes = config.engine.nodes, s.engine_nodes or s.trainer_nodes
    if s.engine_nodes > engines * span + teachers > 0:
        yield (
            f"slurm.engine_nodes = {s.engine_nodes}: more than engine.count = {engines} x engine.nodes = {span}, so "
            "some would idle; raise engine.count"
        )
    if engines and homes % span:
        name = "engine_nodes" if s.engine_nodes else "trainer_nodes"
        yield f"slurm.{name} = {homes}: not a multiple of engine.nodes = {span}; change one of them"
    if s.heterogeneous and not s.engine_nodes:
        yield "slurm.heterogeneous = true: needs slurm.engine_nodes >= 1; raise that, or set this to false"
    if not s.heterogeneous:
        for name in ("engine_gpus_per_node", "engine_gpu_type", "engine_partition", "engine_sbatch_args"):
            if (value := getattr(s, name)) not in (None, ()):
                yield f"slurm.{name} = {value}: needs slurm.heterogeneous = true; set it, or remove this"
    ranks = -(-p.world_size // s.trainer_nodes)
    places = server_places(config)
    serving = max((first + gpus for _, first, gpus in places.values()), default=0)
    servers = "engines and teachers" if teachers else "engines"
    colocated = config.engine.placement == "colocated"
    if colocated and s.engine_nodes:
        yield (
            f"slurm.engine_nodes = {s.engine_nodes}: with engine.placement = colocated engines share the trainers' "
            "GPUs; set it to 0, or engine.placement to disaggregated"
        )
    trainer_need, added = ranks, ""
    if not s.engine_nodes:
        trainer_need = max(ranks, serving)
        added = f" and, colocated, {servers} on {serving}" if colocated else f" and {servers} on {trainer_need - ranks}"
    if 0 < s.gpus_per_node < trainer_need:
        yield (
            f"slurm.gpus_per_node = {s.gpus_per_node}: a trainer node runs {ranks} ranks{added}; use more nodes "
            "(slurm.trainer_nodes) or fewer ranks and engines"
        )
    elif s.gpus_per_node > trainer_need:
        idle = s.gpus_per_node - trainer_need
        notes.append(f"slurm.gpus_per_node = {s.gpus_per_node}: {idle} GPUs of each trainer node are not used")
    if s.engine_nodes and 0 < s.serving_gpus_per_node < serving:
        yield (
            f"slurm.engine_nodes = {s.engine_nodes}: an engine node would serve on {serving} GPUs and has "
            f"{s.serving_gpus_per_node}; use more nodes, or lower engine.count or engine.tensor_parallel"
        )
    yield from _need_gpus(config, engines)


def _need_gpus(config: Config, engines: int) -> list[str]:
    """Return settings that need a GPU if the requested nodes have none."""
    m, s, engine = config.model, config.slurm, config.engine
    trains, serves = s.gpus_per_node > 0, s.serving_gpus_per_node > 0
    refused = {
        f"model.fp8 = {m.fp8}": m.fp8 != "none" and not trains,
        f"model.layers = {m.layers}": m.layers == "transformer_engine" and not trains,
        f"engine.quantization = {engine.quantization}": engine.serves_fp8 and engines > 0 and not serves,
    }
    reason = "needs GPUs, but its nodes have none; set slurm.gpus_per_node or engine_gpus_per_node, or change this"
    return [f"{setting}: {reason}" for setting, wrong in refused.items() if wrong]
