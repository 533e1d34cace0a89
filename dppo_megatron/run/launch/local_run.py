"""`dppo-megatron train`: runs and shows a run on this machine, from the first process to the exit code."""

from __future__ import annotations

import contextlib
import math
import signal
import time

from dppo_megatron.common.file_lock import FileLock
from dppo_megatron.common.process import Child
from dppo_megatron.config import Config
from dppo_megatron.report.console import ProgressView
from dppo_megatron.report.logs import append_line, last_lines, root_cause
from dppo_megatron.report.run_state import record_attempt
from dppo_megatron.report.tail import evaluated
from dppo_megatron.rollout.fleet.registry import engine_names
from dppo_megatron.run.checks.resume import earlier_run
from dppo_megatron.run_dir import RunDir

from .driver import LAST_LINES, Completed, Failed, RunDriver, TrainerStopped
from .launcher import RunPlan
from .local_processes import LocalLauncher, ProcessPlan

POLL_S = 0.05


def finished(config: Config) -> bool:
    """Return whether the run is complete: all steps are done, and the final model and all evaluations exist."""
    run, steps = RunDir(config.run.dir), config.train.steps
    last, latest = run.final_adapter if config.model.lora.r else run.final_model, run.checkpoints / "latest"
    if run.done < steps or not last.exists():
        return False
    if latest.exists() and last.stat().st_mtime < latest.stat().st_mtime:  # the model has fewer steps
        return False
    return not config.samples or {(steps, name) for name in config.eval_sets} <= evaluated(run.metrics)


class LocalRun:
    """Executes a whole run on this machine, and ends it if a process fails that cannot be restarted.

    The other processes are ended, and the failed process's last log lines are shown. Bank and checkpoints stay for
    `--resume`.
    """

    def __init__(
        self, config: Config, plan: RunPlan[ProcessPlan], lock: FileLock | None = None, *, resume_command: str = ""
    ):
        """Prepare the run. `lock`: the run directory lock. Messages show `resume_command`, default `train --resume`."""
        self._config = config
        self._run = RunDir(config.run.dir)
        self._plan = plan
        self._lock = lock
        self._resume_command = resume_command or f"`dppo-megatron train {self._run.config} --resume`"
        self._stop_signal: int | None = None

    def run(self) -> int:
        """Run until the end. Return 0 when it completed, 1 when a process failed, 128 + signal when stopped."""
        handlers = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        rollout = self._config.rollout
        self._view = ProgressView(self._config.train.steps, samples=rollout.prompts_per_step * rollout.group_size)
        driver = RunDriver(self._config, LocalLauncher(self._run, self._lock), self._report)
        try:
            record_attempt(self._run, "started", "")
            driver.start(self._plan)
            self._view.note(f"run directory {self._run.root}, logs in {self._run.logs}")
            if (saved := self._run.checkpoint_step) is not None:
                self._view.note(f"resumes after step {saved} of {self._config.train.steps}")
            return self._watch(driver)
        except Exception as error:
            record_attempt(self._run, "failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            driver.end_all()
            self._view.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _watch(self, driver: RunDriver) -> int:
        shown, started = None, time.monotonic()
        while True:
            if self._view.poll(self._run.metrics):
                started = math.inf
            elif time.monotonic() > started + 5 and (waits := self._waits_for()) != shown:
                self._view.note(f"waiting for the first step: {waits}")
                shown = waits
            if self._stop_signal is not None:
                name = signal.Signals(self._stop_signal).name
                self._view.note(f"{name}: stopping; {self._next()}")
                record_attempt(self._run, "stopped", f"{name}; {self._next()}")
                return 128 + self._stop_signal
            match driver.check():
                case None:
                    time.sleep(POLL_S)
                case Completed():
                    self._view.poll(self._run.metrics)
                    record_attempt(self._run, "completed", "")
                    return 0
                case TrainerStopped():
                    done, steps = self._run.checkpoint_step or 0, self._config.train.steps
                    cause = (
                        f"the trainer was asked to stop, not by this command, at step {done} of {steps}; "
                        f"resume with {self._resume_command}"
                    )
                    self._report(cause)
                    record_attempt(self._run, "stopped", cause)
                    return 1
                case Failed(process) as failed:
                    raised = root_cause(process.log) if (process.poll() or 0) > 0 else None
                    record_attempt(self._run, "failed", "; ".join(filter(None, (failed.cause, raised))))
                    self._show_failure(failed)
                    return 1

    def _waits_for(self) -> str:
        for name in engine_names(self._config):
            if not (self._run.services / f"{name}.json").exists():
                return f"{name} loads the model and warms up; see {self._run.log(name)}"
        if not self._plan.trainers:
            return f"the engines sample; see {self._run.log('orchestrator')}"
        return f"the trainer loads the model, and on GPUs compiles kernels; see {self._run.log('trainer-0')}"

    def _report(self, line: str) -> None:
        """Show a line to the user and append it to a log."""
        self._view.note(line)
        with contextlib.suppress(OSError):  # a full disk must not hide the reason
            append_line(self._run.log("train"), line)

    def _show_failure(self, failed: Failed[Child]) -> None:
        child = failed.process
        self._report(failed.cause + (f"; see {child.log}" if failed.hung else f". Its last lines ({child.log}):"))
        for line in [] if failed.hung and not child.poll() else last_lines(child.log, LAST_LINES):
            self._view.note(f"  {line}")
        self._view.note(f"the run stopped; {self._next()}")

    def _next(self) -> str:
        if earlier_run(self._config):
            at = self._run.checkpoint_step
            saved = "" if at is None else f" (last checkpoint: step {at})"
            return f"bank and checkpoints in {self._run.root} are kept{saved}; resume with {self._resume_command}"
        return "there is nothing to resume yet; correct the cause and start it again"

    def _on_signal(self, number: int, _frame: object) -> None:
        self._stop_signal = number
