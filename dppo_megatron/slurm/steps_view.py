"""The steps of a job as text, before Slurm has chosen its nodes."""

from __future__ import annotations

import shlex

from dppo_megatron.config import Config
from dppo_megatron.run_dir import RunDir

from .allocation import Allocation
from .placement import StepPlan, check_plan, job_plan, preflight_plans
from .step import srun_command


def steps_of_job(config: Config, *, resume: bool) -> str:
    """Which node does what, then the srun line of every step in the order of its start; nodes are node1, node2, ..."""
    s = config.slurm
    nodes = [f"node{number + 1}" for number in range(s.trainer_nodes + s.engine_nodes)]
    cut = s.trainer_nodes if s.heterogeneous else len(nodes)
    allocation = Allocation("JOB", 0, tuple(tuple(part) for part in (nodes[:cut], nodes[cut:]) if part))
    run = job_plan(config, allocation, resume=resume)
    before = [check_plan(config, allocation)]
    before += preflight_plans(config, allocation, "HOST,PORT") if s.preflight else []
    steps = [*before, *run.engines, *([run.orchestrator] if run.orchestrator else []), *run.trainers]
    lines = ["which node does what (Slurm chooses the nodes):"]
    for node in nodes:
        work = [_work(config, step, node) for step in steps if node in step.nodes]
        lines.append(f"  {node}: {', '.join(['driver', *work] if node == nodes[0] else work)}")
    file = RunDir(config.run.dir).config
    commands = [shlex.join(srun_command(config, file, step, allocation)) for step in steps]
    return "\n  ".join(["\n".join([*lines, "steps that the driver on node1 starts:"]), *commands])


def _work(config: Config, step: StepPlan, node: str) -> str:
    if step.name == "trainer":
        first = step.nodes.index(node) * step.tasks_per_node
        return f"trainer ranks {first}-{first + step.tasks_per_node - 1}"
    if step.arguments[0] != "engine" or not step.gpus_per_node:
        return step.name
    gpu = int(step.arguments[-1])
    return f"{step.name} (GPUs {gpu}-{gpu + config.engine.devices_per_node - 1})"
