"""The preflight of a run on the nodes of its job."""

from __future__ import annotations

import os
from collections.abc import Callable

from dppo_megatron.checks import slurm
from dppo_megatron.config import Config, ConfigError, save_resolved, with_absolute_paths
from dppo_megatron.launch.preflight import preflight_here
from dppo_megatron.preflight.watch import Preflight, run_preflight
from dppo_megatron.run_dir import RunDir

from .allocation import Allocation
from .placement import preflight_plans
from .step import Step, StepLauncher
from .task import node_address, unused_port


def preflight_now(config: Config) -> Preflight:
    """Of the nodes of the job that this command is in, else of this machine; leaves RUN/preflight.yaml."""
    config = with_absolute_paths(config)
    run = RunDir(config.run.dir)
    file = run.root / "preflight.yaml"
    run.make()
    save_resolved(config, file)
    if "SLURM_JOB_ID" not in os.environ:
        return preflight_here(config, file)
    allocation = Allocation.of_this_job()
    if problems := slurm.problems(config, allocation.sizes):
        raise ConfigError("preflight", problems)
    return preflight_of_job(config, allocation, StepLauncher(config, file, allocation))


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
        for plan in preflight_plans(config, allocation, f"{host},{port},{token}"):
            steps.append(launcher.start(plan))
        return steps

    try:
        return run_preflight(config, places, start, stopped)
    finally:
        launcher.end(steps, 0.0)
