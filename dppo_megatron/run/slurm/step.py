"""Builds the srun command line for each job step, and starts and ends the steps."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dppo_megatron.common.process import with_this_process
from dppo_megatron.config import Config
from dppo_megatron.run.checks.slurm import server_places
from dppo_megatron.run.launch.launcher import Launcher
from dppo_megatron.run_dir import RunDir

from .allocation import Allocation
from .placement import StepPlan, check_plan, job_plan, preflight_plans

# srun would take these batch script options from the environment as srun options.
BATCH_OPTIONS = (
    "SLURM_CPUS_PER", "SLURM_DISTRIBUTION", "SLURM_EXACT", "SLURM_EXPORT_ENV", "SLURM_GPUS", "SLURM_GPU_", "SLURM_HINT",
    "SLURM_MEM_PER", "SLURM_NTASKS_PER", "SLURM_THREADS_PER_CORE", "SLURM_TRES",
)  # fmt: skip
KILL_S = 10.0  # time for Slurm to kill a step's tasks


class JobStep:
    """Represents a running srun.

    srun messages go to the job's output, and task output to the run's logs; with `output`, both go to `output`.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, output: BinaryIO | None = None):
        self.name = name
        self.log = log  # log that the task writes, if any
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=step_environment(os.environ),
            start_new_session=True,
            preexec_fn=with_this_process(),
        )

    def poll(self) -> int | None:
        """Return srun's exit code, which is the largest task exit code, or None while srun runs."""
        return self._process.poll()

    def request_stop(self) -> None:
        """Request a stop by SIGUSR1, which srun forwards to the tasks. Tasks stop as on SIGTERM."""
        self._process.send_signal(signal.SIGUSR1)  # does nothing if the process has ended

    def kill(self) -> None:
        """Send SIGTERM, so that srun kills all tasks at once."""
        self._process.terminate()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the step ended in time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclass(frozen=True)
class StepLauncher(Launcher[StepPlan, JobStep]):
    """Starts job steps in this allocation. Steps without a `home` read their config from `config_file`."""

    config: Config
    config_file: Path
    allocation: Allocation

    def start(self, plan: StepPlan) -> JobStep:
        command = srun_command(self.config, self.config_file, plan, self.allocation)
        log = RunDir(plan.home).log("engine-0") if plan.home else RunDir(self.config.run.dir).log(plan.name)
        with log.open("ab") if plan.collected else nullcontext() as output:
            return JobStep(plan.name, command, log, output)

    def end(self, processes: Sequence[JobStep], grace_s: float) -> None:
        """Stop the steps. Tasks that Slurm has not killed `KILL_S` after the grace period end with the job."""
        for request, timeout_s in ((JobStep.request_stop, grace_s), (JobStep.kill, KILL_S)):
            for step in processes:
                request(step)
            deadline = time.monotonic() + timeout_s
            for step in processes:
                step.wait(max(0.0, deadline - time.monotonic()))


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(BATCH_OPTIONS)}


def srun_command(config: Config, config_file: Path, plan: StepPlan, allocation: Allocation) -> list[str]:
    """Return the srun command line for a step.

    Ranks are numbered node by node. Steps overlap, so no step waits for another step's resources. A failed task ends
    the step, unless the step is `collected`.
    """
    program = config.slurm.command or (sys.executable, "-m", "dppo_megatron")
    return [
        "srun",
        f"--job-name={plan.name}",
        *([f"--het-group={plan.group}"] if allocation.heterogeneous else []),
        f"--nodes={len(plan.nodes)}",
        f"--nodelist={','.join(plan.nodes)}",
        f"--ntasks={plan.tasks}",
        f"--ntasks-per-node={plan.tasks_per_node}",
        f"--gpus-per-node={plan.gpus_per_node}" if plan.gpus_per_node else "--gres=none",
        *("--distribution=block", "--overlap", "--wait=0", "--cpu-bind=none", "--mpi=none"),
        f"--kill-on-bad-exit={0 if plan.collected else 1}",
        *config.slurm.srun_args,
        *(*program, "slurm-task", *plan.arguments, str(RunDir(plan.home).config if plan.home else config_file)),
    ]


def steps_of_job(config: Config, *, resume: bool) -> str:
    """List the work on each node, then the srun lines in start order, as text. Nodes are node1, node2, ..."""
    s = config.slurm
    nodes = [f"node{number + 1}" for number in range(s.trainer_nodes + s.engine_nodes)]
    cut = s.trainer_nodes if s.heterogeneous else len(nodes)
    allocation = Allocation("JOB", 0, tuple(tuple(part) for part in (nodes[:cut], nodes[cut:]) if part))
    run = job_plan(config, allocation, resume=resume)
    check_plans = [check_plan(config, allocation)]
    check_plans += preflight_plans(config, allocation, "HOST,PORT") if s.preflight else []
    steps = [*check_plans, *run.engines, *([run.orchestrator] if run.orchestrator else []), *run.trainers]
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
    _, gpu, gpus = server_places(config)[step.name]
    return f"{step.name} (GPUs {gpu}-{gpu + gpus - 1})"
