"""Defines the commands and environments of a run's processes on this machine, and starts and ends them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dppo_megatron.common.environment import cpu_threads
from dppo_megatron.common.file_lock import FileLock
from dppo_megatron.common.process import Child
from dppo_megatron.config import Config, save_resolved, with_absolute_paths
from dppo_megatron.rollout.engines.secret import make_secret
from dppo_megatron.rollout.engines.teachers import teacher_config
from dppo_megatron.rollout.fleet.registry import engine_names, forget_all, free_port
from dppo_megatron.run.checks.devices import devices_needed, engine_devices, visible_devices
from dppo_megatron.run_dir import RunDir

from .launcher import Launcher, RunPlan
from .rank_environment import connection_environment, torchrun_environment, trace_environment


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    name: str  # trainer-0, orchestrator, engine-0, ...; also the name of the log
    arguments: tuple[str, ...]  # arguments of `dppo-megatron`
    environment: Mapping[str, str] = field(default_factory=dict)  # added to this process's environment
    home: Path | None = None


class LocalLauncher(Launcher[ProcessPlan, Child]):
    """Starts each process in a new session, with output to `RUN/logs/<name>.log`."""

    def __init__(self, run: RunDir, lock: FileLock | None = None):
        self._run = run
        self._lock = lock

    def start(self, plan: ProcessPlan) -> Child:
        command = dppo_command(*plan.arguments)
        return Child(plan.name, command, self._run.log(plan.name), plan.environment, self._lock)

    def end(self, processes: Sequence[Child], grace_s: float) -> None:
        """End all processes in each session, even if the first process has ended. Return when all have ended."""
        for child in processes:
            child.signal(signal.SIGTERM)
        for child in processes:
            child.end(grace_s)


def dppo_command(*arguments: str) -> list[str]:
    """Return the command line of this program under this interpreter, regardless of PATH."""
    return [sys.executable, "-m", "dppo_megatron", *arguments]


def local_plan(config: Config, *, resume: bool) -> RunPlan[ProcessPlan]:
    """Return the plans for all processes in a run, each rank singly. They read the config from the run directory."""
    path = str(RunDir(config.run.dir).config)
    return RunPlan(
        engines=[*engine_plans(config), *teacher_plans(config)],
        orchestrator=ProcessPlan("orchestrator", ("orchestrator", path)) if config.samples else None,
        trainers=rank_plans(config, "trainer", ("trainer", path, *(["--resume"] if resume else []))),
    )


def teacher_plans(config: Config) -> list[ProcessPlan]:
    """Prepare the teachers that the run serves, and return plans for their processes, on the last GPUs."""
    visible, plans = visible_devices()[: devices_needed(config)], []
    for name, home in reversed(prepare_teachers(config).items()):
        count = config.distillation.teachers[name].tensor_parallel
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(visible[-count:])} if visible else {}
        plans.append(ProcessPlan(f"teacher-{name}", ("engine", str(RunDir(home).config)), environment, home))
        visible = visible[:-count]
    return plans


def prepare_teachers(config: Config) -> dict[str, Path]:
    """Write a run directory with config and secret for each teacher that the run serves; return name -> directory."""
    homes = {}
    for name in config.started_teachers:
        server_config = teacher_config(config, name)
        run = RunDir(server_config.run.dir)
        run.make()
        forget_all(run)
        save_resolved(with_absolute_paths(server_config), run.config)
        make_secret(server_config)
        homes[name] = server_config.run.dir
    return homes


def rank_plans(config: Config, name: str, arguments: tuple[str, ...]) -> list[ProcessPlan]:
    """Return plans for `parallel.world_size` processes NAME-0, NAME-1, ... in a group, each with `arguments`."""
    size, port = config.parallel.world_size, free_port()
    common = cpu_threads(size) | connection_environment(config) | trace_environment(RunDir(config.run.dir))
    variables = [torchrun_environment(rank, size, rank, size, "127.0.0.1", port) for rank in range(size)]
    return [ProcessPlan(f"{name}-{rank}", arguments, common | added) for rank, added in enumerate(variables)]


def engine_plans(config: Config, *, trains: bool = True) -> list[ProcessPlan]:
    """Return plans for the engines that the run starts, with GPUs. `trains`: trainer ranks use the first GPUs."""
    path, visible = str(RunDir(config.run.dir).config), visible_devices()
    plans = []
    for index, name in enumerate(engine_names(config)):
        devices = engine_devices(config, index, visible, trains=trains)
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
        plans.append(ProcessPlan(name, ("engine", path, "--index", str(index)), environment))
    return plans
