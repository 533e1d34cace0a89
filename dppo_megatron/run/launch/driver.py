"""Starts, watches, restarts and ends a run's processes, in the same way on this machine and on Slurm."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from dppo_megatron.common.heartbeat import INTERVAL_S
from dppo_megatron.common.process import exit_reason
from dppo_megatron.common.retry import doubling_delay_s
from dppo_megatron.config import Config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.report.doctor import Examination, Finding
from dppo_megatron.report.logs import Warnings
from dppo_megatron.report.run_state import HeartbeatReader, hang
from dppo_megatron.report.tail import sparse
from dppo_megatron.rollout.engines.secret import make_secret
from dppo_megatron.rollout.fleet.registry import forget, forget_all
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.place import clear, lead

from .launcher import Launcher, PlanT, ProcessT, RunPlan

GRACE_S = 10.0
LAST_LINES = 25  # log lines shown for a failed process
ORPHANS_S = 1.0  # time for a dead server's orphans to end by themselves
FIRST_S, LONGEST_S = 1.0, 60.0  # first and longest delay before a server is started again
FULL_BYTES = 64 << 10  # a file system with less space is called full
HEALTHY_S = 300.0  # after serving for this long, the restart count begins again


@dataclass(frozen=True, slots=True)
class Completed:
    """Indicates that every step is done and the orchestrator has ended."""


@dataclass(frozen=True, slots=True)
class Failed(Generic[ProcessT]):
    """Names the failed process: a worker, or an engine without further restarts.

    hung: the rank that hangs, and the calls in which the others wait. `process` may then still run.
    """

    process: ProcessT
    cause: str  # how the process ended, and `hung`
    hung: str = ""

    @classmethod
    def from_process(cls, process: ProcessT, hung: str = "") -> Failed[ProcessT]:
        """Describe the failure of a process. Call it at once, because the free space on the disk changes."""
        code, logs = process.poll(), process.log.parent
        ended = "" if code is None else f"{process.name} ended: {exit_reason(code)}"
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL) and not hung:
            ended += " (the kernel kills a process if memory is short: `dmesg -T | grep -i oom` on its machine)"
        with contextlib.suppress(OSError):
            if ended and shutil.disk_usage(logs).free < FULL_BYTES:  # a log may lack the error then
                ended += f" (no space is left in {logs}; free space there, or use a larger file system)"
        return cls(process, "; ".join(filter(None, (ended, hung))), hung)


@dataclass(frozen=True, slots=True)
class TrainerStopped:
    """Indicates that the trainer ended before the last step, by a signal that the driver did not send."""


class RestartedServer(Generic[PlanT, ProcessT]):
    """Starts an engine or teacher, and restarts it when it ends, at most `limit` times in a row.

    Call `check` often; it never blocks for long. The server serves once it is registered: an engine in the run, a
    teacher in a separate run directory. When the server ends, the registration is removed.
    """

    def __init__(self, launcher: Launcher[PlanT, ProcessT], plan: PlanT, run: RunDir, limit: int):
        self._launcher = launcher
        self._plan = plan
        self._limit = limit
        self._restarts = 0  # consecutive restarts
        self._serving_since: float | None = None
        self._ever_served = False
        self._due: float | None = None  # when to start the server again
        self.process = launcher.start(plan)
        self._registered = (run, self.process.name) if plan.home is None else (RunDir(plan.home), "engine-0")
        self.failed = False  # the server ended and is not started again

    def check(self, now: float) -> str | None:
        """Return a log line about the events since the last call, or None.

        Sets `failed` if the server ended and is not started again.
        """
        if self._due is not None:
            if now >= self._due:
                self._due, self.process = None, self._launcher.start(self._plan)
            return None
        code, (run, entry) = self.process.poll(), self._registered
        # An ended server is checked as well, because it may have registered and ended between two calls.
        serves = self._serving_since is None and (run.services / f"{entry}.json").exists()
        if serves:
            self._serving_since, self._ever_served = now, True
        if code is not None:
            return self._plan_restart(exit_reason(code), now)
        return f"{self.process.name} serves again" if serves and self._restarts else None

    def _plan_restart(self, reason: str, now: float) -> str | None:
        """Schedule the next start of the ended server, or set `failed`."""
        name = self.process.name
        forget(*self._registered)
        self._launcher.end([self.process], ORPHANS_S)
        served_s = 0.0 if self._serving_since is None else now - self._serving_since
        self._restarts = 1 if served_s >= HEALTHY_S else self._restarts + 1
        self._serving_since = None
        if not self._ever_served:  # it is probably misconfigured, so a restart would not help
            self.failed = True
            return None
        if self._restarts > self._limit:
            self.failed = True
            return f"{name} is not started again after {self._limit} restarts in a row (engine.restarts)"
        delay = doubling_delay_s(FIRST_S, self._restarts - 1, LONGEST_S)
        self._due = now + delay
        return (
            f"{name} ended: {reason}. Restart {self._restarts} of {self._limit} (engine.restarts) in {delay:g} s; "
            f"see {self.process.log}"
        )


class RunDriver(Generic[PlanT, ProcessT]):
    """Runs engines, orchestrator and trainer ranks until orchestrator and trainer are done, or a process fails.

    An engine that ends is started again and serves the newest published policy (`engine.restarts`). The caller must
    call `check` in a loop, and decides about exit code, messages and requeue.
    """

    def __init__(self, config: Config, launcher: Launcher[PlanT, ProcessT], report: Callable[[str], None]):
        self._config = config
        self._run = RunDir(config.run.dir)
        self._launcher = launcher
        self._report = report  # shows the user a line about an engine or a finding
        self._examination = Examination(self._run.root, sparse)
        self._warnings = Warnings(self._run.log(name) for name in ("orchestrator", "trainer-0"))
        self._servers: list[RestartedServer[PlanT, ProcessT]] = []  # restarted until the run ends
        self._workers: list[ProcessT] = []  # orchestrator and trainers, which end by themselves after their work
        self.trainers: list[ProcessT] = []
        self._heartbeats = HeartbeatReader(self._run)
        self._look_at_beats = 0.0  # when to read the heartbeats next

    def start(self, plan: RunPlan[PlanT]) -> None:
        """Start all processes. Engines come first, because they take the longest to start."""
        lead(self._run, self._config.weight_sync.directory if self._config.samples else None)
        forget_all(self._run)
        shutil.rmtree(self._run.heartbeats, ignore_errors=True)  # left by an earlier attempt
        if plan.engines:
            make_secret(self._config)
        for engine in plan.engines:
            self._servers.append(RestartedServer(self._launcher, engine, self._run, self._config.engine.restarts))
        if plan.orchestrator is not None:
            self._workers.append(self._launcher.start(plan.orchestrator))
        for trainer in plan.trainers:
            self.trainers.append(self._launcher.start(trainer))
            self._workers.append(self.trainers[-1])
        # Drops findings that an earlier attempt has reported. Earlier steps are read while the processes load.
        self._examine(rollouts=False)

    def check(self) -> Completed | Failed[ProcessT] | TrainerStopped | None:
        """Return how the run ended, or None while it runs. Restarts engines. Call it often; it does not block."""
        for finding in self._examine(rollouts=True):
            self._report(f"doctor: {finding}")
        for warning in self._warnings.poll():
            self._report(warning)
        if failed := [worker for worker in self._workers if worker.poll() not in (None, 0)]:
            # The cause is a killed process, else the process that raised first. Other processes raise later.
            first = min(failed, key=lambda worker: ((worker.poll() or 0) > 0, _written(worker.log)))
            hung = hang(self._heartbeats.read(), time.time()) if first in self.trainers else ""
            return Failed.from_process(first, hung)
        if self.trainers and time.monotonic() > self._look_at_beats:
            self._look_at_beats, stall_s = time.monotonic() + INTERVAL_S, self._config.run.stall_timeout_s
            if hung := hang(self._heartbeats.read(), time.time(), stall_s):
                return Failed.from_process(self.trainers[0], f"{hung} (run.stall_timeout_s = {stall_s:g})")
        if self._trainers_ended and not self.trained:
            return TrainerStopped()
        if all(worker.poll() == 0 for worker in self._workers):
            return Completed()
        for server in self._servers:
            if event := server.check(time.monotonic()):
                self._report(event)
            if server.failed:
                return Failed.from_process(server.process)
        return None

    @property
    def trained(self) -> bool:
        """Return whether the trainer ended after the last step. The rest of the run then takes no time."""
        return self._trainers_ended and self._run.done >= self._config.train.steps

    def end_all(self) -> None:
        """End all processes. Workers come first, because a rank may need the engines to finish its step.

        May be called again.
        """
        self._launcher.end(self._workers, GRACE_S)
        self._launcher.end([server.process for server in self._servers], GRACE_S)
        self._examination.close()
        if self._config.weight_sync.directory is not None:
            with contextlib.suppress(ExpectedError, OSError):  # remaining files do not fail a run
                clear(self._run)

    def _examine(self, *, rollouts: bool) -> list[Finding]:
        try:
            return self._examination.advance(rollouts=rollouts)
        except (ExpectedError, OSError):  # the run does not depend on its examination
            return []

    @property
    def _trainers_ended(self) -> bool:
        """Return whether all trainers ended with exit code 0: after the last step, or after a signal."""
        return bool(self.trainers) and all(trainer.poll() == 0 for trainer in self.trainers)


def _written(log: Path) -> float:
    return log.stat().st_mtime if log.exists() else 0.0
