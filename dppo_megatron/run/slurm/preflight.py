"""Runs a preflight on a job's nodes or on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from dppo_megatron.config import Config, ConfigError, save_resolved, with_absolute_paths, with_settings
from dppo_megatron.rollout.fleet.registry import free_port
from dppo_megatron.run.checks import slurm
from dppo_megatron.run.launch.local_processes import LocalLauncher, ProcessPlan
from dppo_megatron.run.preflight.watch import Preflight, run_preflight
from dppo_megatron.run_dir import RunDir

from .allocation import Allocation
from .placement import StepPlan, preflight_plans
from .step import StepLauncher
from .task import LOOPBACK, node_address


def preflight_now(config: Config) -> Preflight | None:
    """Check the nodes of the job that runs this command, or this machine outside a job. Writes RUN/preflight.yaml."""
    config, in_job = with_absolute_paths(config), "SLURM_JOB_ID" in os.environ
    if not in_job:
        one = {"trainer_nodes": 1, "engine_nodes": 0, "heterogeneous": False}
        config = with_settings(config, engine={"nodes": 1}, slurm=one)
    run = RunDir(config.run.dir)
    file = run.root / "preflight.yaml"
    run.make()
    save_resolved(config, file)
    if not in_job:
        return _preflight_here(config, run, file)
    allocation = Allocation.current()
    if problems := slurm.problems(config, allocation.sizes):
        raise ConfigError("preflight", problems)
    return preflight_of_job(config, allocation, StepLauncher(config, file, allocation))


def preflight_of_job(
    config: Config, allocation: Allocation, launcher: StepLauncher, stopped: Callable[[], bool] = lambda: False
) -> Preflight | None:
    """Check a job's nodes, see `run_preflight`. Call it on the job's first node, where rank 0 runs."""
    host = node_address(config)
    token = str(free_port(host))
    steps = preflight_plans(config, allocation, f"{host},{token}")
    return run_preflight(config, _places(steps), launcher, steps, token, stopped)


def _preflight_here(config: Config, run: RunDir, file: Path) -> Preflight | None:
    """Run the preflight tasks as children of this process, with the variables that srun would set."""
    node, token = socket.gethostname(), str(free_port())
    steps = preflight_plans(config, Allocation("0", 0, ((node,),)), f"{LOOPBACK},{token}")
    step = {"SLURM_JOB_ID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURMD_NODENAME": node}
    plans = []
    for plan in steps:
        for number in map(str, range(plan.tasks)):
            task = {"SLURM_NTASKS": str(plan.tasks), "SLURM_PROCID": number, "SLURM_LOCALID": number}
            plans.append(ProcessPlan(plan.name, ("slurm-task", *plan.arguments, str(file)), step | task))
    return run_preflight(config, _places(steps), LocalLauncher(run), plans, token)


def _places(steps: Sequence[StepPlan]) -> dict[str, str]:
    """Return process name -> node, for example {"rank-0": "node1", "serving-0": "node2"}."""
    return {
        f"{'serving' if number else 'rank'}-{task}": step.nodes[task // step.tasks_per_node]
        for number, step in enumerate(steps)
        for task in range(step.tasks)
    }
