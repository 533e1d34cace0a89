"""The preflight of a run: on the nodes of its job, or on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from dppo_megatron.checks import slurm
from dppo_megatron.common.process import Child
from dppo_megatron.config import Config, ConfigError, save_resolved, with_absolute_paths
from dppo_megatron.fleet.registry import free_port
from dppo_megatron.launch.local_processes import dppo_command
from dppo_megatron.preflight.watch import Preflight, run_preflight
from dppo_megatron.run_dir import RunDir

from .allocation import Allocation
from .placement import preflight_plans
from .step import Step, StepLauncher
from .task import LOOPBACK, node_address, unused_port


def preflight_now(config: Config) -> Preflight | None:
    """Of the nodes of the job that this command is in, else of this machine; leaves RUN/preflight.yaml."""
    config, run = with_absolute_paths(config), RunDir(config.run.dir.absolute())
    run.make()
    save_resolved(config, run.root / "preflight.yaml")
    if "SLURM_JOB_ID" not in os.environ:
        return _preflight_here(config, run.root / "preflight.yaml")
    allocation = Allocation.of_this_job()
    if problems := slurm.problems(config, allocation.sizes):
        raise ConfigError("preflight", problems)
    return preflight_of_job(config, allocation, StepLauncher(config, run.root / "preflight.yaml", allocation))


def preflight_of_job(
    config: Config, allocation: Allocation, launcher: StepLauncher, stopped: Callable[[], bool] = lambda: False
) -> Preflight | None:
    """See `run_preflight`. To be called on the job's first node, which is that of rank 0."""
    host, steps = node_address(config), list[Step]()
    port = unused_port(host)
    places = {
        f"{'serving' if number else 'rank'}-{task}": plan.nodes[task // plan.tasks_per_node]
        for number, plan in enumerate(preflight_plans(config, allocation, ""))
        for task in range(plan.tasks)
    }

    def start(token: str) -> list[Step]:
        steps.extend(map(launcher.start, preflight_plans(config, allocation, f"{host},{port},{token}")))
        return steps

    try:
        return run_preflight(config, places, start, stopped)
    finally:
        launcher.end(steps, 0.0)


def _preflight_here(config: Config, config_file: Path) -> Preflight | None:
    """One process for each trainer rank and, where weights are broadcast, one that serves, as srun would start them."""
    size, node, children = config.parallel.world_size, socket.gethostname(), list[Child]()
    serving = int(config.weight_sync.transport == "broadcast" and config.started_engines > 0)
    names = [*(f"rank-{rank}" for rank in range(size)), *["serving-0"] * serving]

    def start(token: str) -> list[Child]:
        meeting = f"{LOOPBACK},{free_port()},{token},{serving}"
        step = {"SLURM_JOB_ID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURMD_NODENAME": node}
        step |= {"SLURM_NTASKS": str(size), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        for gpu, name in enumerate(names):
            role, number = ("trains", gpu) if gpu < size else ("serves", 0)
            command = dppo_command("slurm-task", role, str(config_file), "--first-gpu", str(gpu), "--meeting", meeting)
            place = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
            children.append(Child(name, command, RunDir(config.run.dir).log("preflight"), step | place))
        return children

    try:
        return run_preflight(config, dict.fromkeys(names, node), start)
    finally:
        for child in children:
            child.end(0.0)
