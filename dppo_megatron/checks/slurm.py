"""Checks that the run fits the nodes that `slurm` requests. Only the Slurm commands check this."""

from __future__ import annotations

from dppo_megatron.config import Config


def problems(
    config: Config, nodes: tuple[int, ...] | None = None, gpus: int | None = None, notes: list[str] | None = None
) -> list[str]:
    """Return why the run does not fit the nodes that `slurm` requests, or the job has other nodes.

    `nodes` has the number of nodes of each component of the running job, or is None before submission. `gpus` is the
    number of GPUs of its first node, if known. Adds the number of unused GPUs to `notes`.
    """
    out = _requested(config, [] if notes is None else notes) + ([] if nodes is None else _granted(config, nodes))
    if gpus is None or gpus >= (wanted := config.slurm.gpus_per_node):
        return out
    why = f"Slurm granted {gpus} GPUs on the first node; make sbatch's --gpus-per-node or --gres and the config agree"
    return [*out, f"slurm.gpus_per_node = {wanted}: {why}"]


def _granted(config: Config, nodes: tuple[int, ...]) -> list[str]:
    s = config.slurm
    if nodes in ((s.trainer_nodes, s.engine_nodes), (s.trainer_nodes + s.engine_nodes,)):
        return []
    shown = " + ".join(map(str, nodes))
    return [
        f"slurm.trainer_nodes = {s.trainer_nodes}, slurm.engine_nodes = {s.engine_nodes}: the job has {shown} nodes; "
        "make sbatch's --nodes and the config agree"
    ]


def _requested(config: Config, notes: list[str]) -> list[str]:
    s, p = config.slurm, config.parallel
    engines = config.started_engines
    out = [
        f"distillation.teachers.{name}.path = {path}: a job serves no teachers; start its server elsewhere and set urls"
        for name, path in config.started_teachers.items()
    ]
    if p.world_size % s.trainer_nodes:
        out.append(
            f"slurm.trainer_nodes = {s.trainer_nodes}: does not divide parallel.world_size = {p.world_size}; every "
            "trainer node runs the same number of ranks"
        )
    if s.engine_nodes and not engines:
        out.append(f"slurm.engine_nodes = {s.engine_nodes}: the run starts no engine; set it to 0")
    each, homes = config.engine.nodes, s.engine_nodes or s.trainer_nodes
    if s.engine_nodes > engines * each > 0:
        out.append(
            f"slurm.engine_nodes = {s.engine_nodes}: more than engine.count = {engines} x engine.nodes = {each}, so "
            "some would idle; raise engine.count"
        )
    if engines and homes % each:
        name = "engine_nodes" if s.engine_nodes else "trainer_nodes"
        out.append(f"slurm.{name} = {homes}: not a multiple of engine.nodes = {each}; change one of them")
    if s.heterogeneous and not s.engine_nodes:
        out.append("slurm.heterogeneous = true: needs slurm.engine_nodes >= 1; raise that, or set this to false")
    if not s.heterogeneous:
        for name in ("engine_gpus_per_node", "engine_gpu_type", "engine_partition", "engine_sbatch_args"):
            if (value := getattr(s, name)) not in (None, ()):
                out.append(f"slurm.{name} = {value}: needs slurm.heterogeneous = true; set it, or remove this")
    ranks = -(-p.world_size // s.trainer_nodes)
    serving = -(-engines // max(1, homes // each)) * config.engine.devices_per_node
    colocated = config.engine.placement == "colocated"
    if colocated and s.engine_nodes:
        out.append(
            f"slurm.engine_nodes = {s.engine_nodes}: with engine.placement = colocated engines share the trainers' "
            "GPUs; set it to 0, or engine.placement to disaggregated"
        )
    if s.engine_nodes:
        trainer_need, added = ranks, ""
    elif colocated:
        trainer_need, added = max(ranks, serving), f" and, colocated, engines on {serving}"
    else:
        trainer_need, added = ranks + serving, f" and engines on {serving}"
    if 0 < s.gpus_per_node < trainer_need:
        out.append(
            f"slurm.gpus_per_node = {s.gpus_per_node}: a trainer node runs {ranks} ranks{added}; use more nodes "
            "(slurm.trainer_nodes) or fewer ranks and engines"
        )
    elif s.gpus_per_node > trainer_need:
        idle = s.gpus_per_node - trainer_need
        notes.append(f"slurm.gpus_per_node = {s.gpus_per_node}: {idle} GPUs of each trainer node are not used")
    if s.engine_nodes and 0 < s.serving_gpus_per_node < serving:
        out.append(
            f"slurm.engine_nodes = {s.engine_nodes}: an engine node would serve on {serving} GPUs and has "
            f"{s.serving_gpus_per_node}; use more nodes, or lower engine.count or engine.tensor_parallel"
        )
    return out + _need_gpus(config, engines)


def _need_gpus(config: Config, engines: int) -> list[str]:
    """Return settings that need a GPU if the requested nodes have none."""
    m, s, engine = config.model, config.slurm, config.engine
    trains, serves = s.gpus_per_node > 0, s.serving_gpus_per_node > 0
    refused = {
        f"model.fp8 = {m.fp8}": m.fp8 != "none" and not trains,
        f"model.layers = {m.layers}": m.layers == "transformer_engine" and not trains,
        f"engine.quantization = {engine.quantization}": engine.serves_fp8 and engines > 0 and not serves,
    }
    why = "needs GPUs, and its nodes have none; set slurm.gpus_per_node (engine_gpus_per_node), or change this"
    return [f"{setting}: {why}" for setting, wrong in refused.items() if wrong]
