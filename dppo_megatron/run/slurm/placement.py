"""Places the job steps on nodes, as a pure function of config and node names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dppo_megatron.config import Config
from dppo_megatron.run.checks.slurm import server_places
from dppo_megatron.run.launch.launcher import RunPlan
from dppo_megatron.run_dir import RunDir

from .allocation import Allocation


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Describes an srun with tasks spread evenly over `nodes`."""

    name: str  # trainer, orchestrator, engine-0, ...
    arguments: tuple[str, ...]  # arguments of `dppo-megatron slurm-task` before the config
    nodes: tuple[str, ...]
    group: int  # component in a heterogeneous job
    tasks: int = 1
    gpus_per_node: int = 0
    collected: bool = False  # the output goes to the step's log, and a failed task does not end the others
    home: Path | None = None  # run directory, if it is not the job's

    @property
    def tasks_per_node(self) -> int:
        return self.tasks // len(self.nodes)


def job_plan(config: Config, allocation: Allocation, *, resume: bool) -> RunPlan[StepPlan]:
    """Return the plans of all steps. The orchestrator has a single task without GPUs, on the job's first node."""
    first_node = allocation.groups[0][:1]
    return RunPlan(
        engines=server_plans(config, allocation),
        orchestrator=StepPlan("orchestrator", ("orchestrator",), first_node, group=0) if config.samples else None,
        trainers=[trainer_plan(config, allocation, resume=resume)],
    )


def trainer_plan(config: Config, allocation: Allocation, *, resume: bool) -> StepPlan:
    """Return the trainer step, with one task per rank, on the first nodes."""
    return StepPlan(
        "trainer",
        ("trainer", *(["--resume"] if resume else [])),
        nodes=allocation.groups[0][: config.slurm.trainer_nodes],
        group=0,
        tasks=config.parallel.world_size,
        gpus_per_node=config.slurm.gpus_per_node,
    )


def check_plan(config: Config, allocation: Allocation) -> StepPlan:
    """Return a step with a single task on the first node and the ranks' GPUs there, to find the ranks' problems."""
    gpus = config.slurm.gpus_per_node
    return StepPlan("check", ("check",), nodes=allocation.groups[0][:1], group=0, gpus_per_node=gpus)


def preflight_plans(config: Config, allocation: Allocation, store: str) -> list[StepPlan]:
    """Return the trainer step with preflight tasks, and a step with a task per serving node.

    Serving nodes are all nodes that only serve and, if weights are broadcast, all nodes with engines. All tasks connect
    to `store`, a HOST,PORT, see `preflight.task`.
    """
    trainers, engines = trainer_plan(config, allocation, resume=False), server_plans(config, allocation)
    broadcast = config.weight_sync.transport == "broadcast"
    receives = [(node, broadcast and plan.home is None) for plan in engines for node in plan.nodes]
    serving = dict.fromkeys(node for node, updated in receives if updated or node not in trainers.nodes)
    meeting = ("--meeting", f"{store},{trainers.tasks + len(serving)}")
    plans = [replace(trainers, name="preflight", arguments=("trains", *meeting), collected=True)]
    if serving:
        gpu = 0 if config.slurm.engine_nodes else trainers.tasks_per_node  # the GPU of the node's first engine
        arguments = ("serves", "--first-gpu", str(gpu), *meeting)
        step = replace(plans[0], arguments=arguments, nodes=tuple(serving), tasks=len(serving))
        plans.append(replace(step, group=engines[0].group, gpus_per_node=engines[0].gpus_per_node))
    return plans


def server_plans(config: Config, allocation: Allocation) -> list[StepPlan]:
    """Return a step per engine and teacher, so that each can restart separately. See `server_places`.

    An engine on several nodes has a task on each node, and the nodes are consecutive.
    """
    s, plans = config.slurm, []
    group = 1 if allocation.heterogeneous else 0
    nodes = allocation.groups[group]
    if s.engine_nodes and not allocation.heterogeneous:
        nodes = nodes[s.trainer_nodes :]
    gpus = s.serving_gpus_per_node if s.engine_nodes else s.gpus_per_node
    for index, (name, (at, first_gpu, _)) in enumerate(server_places(config).items()):
        home = None
        if index >= config.started_engines:
            index, home = 0, RunDir(config.run.dir).teacher(name.removeprefix("teacher-"))
        arguments = ("engine", "--index", str(index), "--first-gpu", str(first_gpu))
        step_nodes = nodes[at.start : at.stop]
        plans.append(StepPlan(name, arguments, step_nodes, group, tasks=len(at), gpus_per_node=gpus, home=home))
    return plans
