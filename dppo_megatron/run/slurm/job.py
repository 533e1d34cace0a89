"""`dppo-megatron slurm-job`: drives a run's job steps from the batch script, on the job's first node.

Every engine and the orchestrator run in a separate srun, and all trainer ranks share an srun. Engines restart within a
limit. Otherwise, when a step fails or all are done, the job ends, requeues or completes; it never idles.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dppo_megatron.common.files import write_atomic
from dppo_megatron.common.retry import wait_until
from dppo_megatron.config import Config, read_config, with_absolute_paths
from dppo_megatron.errors import ExpectedError, bounded
from dppo_megatron.report.logs import NewErrors
from dppo_megatron.run.checks import check_job
from dppo_megatron.run.checks.resume import record
from dppo_megatron.run.launch.driver import Completed, Failed, RunDriver, TrainerStopped
from dppo_megatron.run.launch.local_processes import prepare_teachers
from dppo_megatron.run_dir import RunDir

from . import queue
from .allocation import Allocation
from .attempts import TIME_LIMIT, AttemptLog, Event
from .placement import check_plan, job_plan
from .preflight import preflight_of_job
from .step import JobStep, StepLauncher
from .submit import refuse_second_job

POLL_S = 0.1
LOCK_S = 120.0  # NFS frees a dead node's lock after the lease, 90 s
EXCLUDE_S = 20.0  # time to exclude nodes from a requeued job
SIGNAL_S = 5.0  # time for Slurm's signal to arrive, if Slurm may be ending the job
REJECTED = 2  # exit code of a `ConfigError`
REQUEUE, STOP = signal.SIGUSR1, signal.SIGUSR2
CANCELLED = (signal.SIGTERM, signal.SIGINT)


def run_job(config_file: Path, overrides: Sequence[str], *, resume: bool) -> int:
    """Run a job attempt and return the batch script's exit code.

    The code is 0 if the run completed. If a step failed, the code is the exit code of the first failed step. Later
    attempts continue under the settings that the first attempt saved, even if the file has changed.
    """
    allocation = Allocation.current()
    note = Path(f"slurm-{allocation.job_id}.run")  # a later attempt knows the job number, but not CONFIG
    source = config_file
    if allocation.restart and note.exists():
        source, overrides = Path(note.read_text()), ()
    config = with_absolute_paths(read_config(source, overrides))
    run = RunDir(config.run.dir)
    resume = resume or (allocation.restart > 0 and run.config.exists())  # the first attempt may have ended sooner
    check_job(config, str(source), resume=resume, nodes=allocation.sizes, gpus=allocation.gpus)
    queue.retry_until_answered(lambda: refuse_second_job(run, allocation.job_id), config.slurm.signal_lead_s)
    with run.take(LOCK_S):
        record(config)
        if config_file.absolute() == run.config:
            note.unlink(missing_ok=True)  # a job on another cluster may have left it
        else:
            _write_note(note, str(run.config))
        return Job(config, allocation, resume=resume).run()


def _write_note(note: Path, text: str) -> None:
    try:
        write_atomic(note, text)
    except OSError as error:
        raise queue.SlurmError(
            f"{note.absolute()}: cannot be written ({error}), and without it a requeued job could not find its run; "
            "submit from a directory that the nodes can write to"
        ) from None


class Job:
    """Runs a job attempt, from the first step to the exit code."""

    def __init__(self, config: Config, allocation: Allocation, *, resume: bool):
        self._config = config
        self._allocation = allocation
        self._resume = resume
        self._run = RunDir(config.run.dir)
        self._attempts = AttemptLog(self._run)
        self._errors = NewErrors(self._run.logs)
        self._launcher = StepLauncher(config, self._run.config, allocation)
        self._driver = RunDriver(config, self._launcher, print_line)
        self._signal = 0  # last signal number; 0 before the first signal

    def run(self) -> int:
        for number in (REQUEUE, STOP, *CANCELLED):
            signal.signal(number, self._on_signal)
        first = self._allocation.restart == 0
        cause = "submitted" if first else self._attempts.why_restarted()
        nodes = tuple(name for group in self._allocation.groups for name in group)
        self._record("started", cause, nodes=nodes)
        print_line(f"run directory {self._run.root} on {', '.join(nodes)} ({cause}); logs in {self._run.logs}")
        try:
            if first and (code := self._check_config()):
                return code
            if self._config.slurm.preflight and not self._signal and (code := self._preflight()):
                return code
            if not self._signal:
                prepare_teachers(self._config)
                self._driver.start(job_plan(self._config, self._allocation, resume=self._resume))
            return self._watch()
        finally:
            self._driver.end_all()

    def _check_config(self) -> int:
        """Check the config on a node, before many GPUs wait for a model to load; return 0 if it is valid."""
        step = self._launcher.start(check_plan(self._config, self._allocation))
        while (code := step.poll()) is None and not self._signal:
            time.sleep(POLL_S)
        step.kill()
        if code == REJECTED:
            self._record("failed", "the config was rejected")
            return code
        return self._failed(Failed.from_process(step)) if code else 0

    def _preflight(self) -> int:
        """Return 0 if the nodes are healthy; otherwise requeue the job without the bad nodes.

        If no other node would help, the job fails instead.
        """
        node = self._allocation.groups[0][0]
        try:
            report = preflight_of_job(self._config, self._allocation, self._launcher, lambda: bool(self._signal))
        except ExpectedError as error:  # this node has no address that other nodes can reach
            return self._requeue(f"preflight: {node}: {error}", 1, without=(node,))
        if report is None:
            return 0
        print_line(report.text())
        if not report.errors:
            return 0
        cause = bounded(f"preflight: {'; '.join(map(str, report.errors))}")
        if any(finding.everywhere for finding in report.errors):
            self._record("failed", cause)
            print_line("other nodes would not help, so the job is not requeued; correct this and submit with --resume")
            return 1
        return self._requeue(cause, 1, without=report.bad_nodes)

    def _watch(self) -> int:
        while True:
            if self._signal in CANCELLED:
                return self._cancelled()
            if self._signal and not self._driver.trained:
                return self._stop_early()
            match self._driver.check():
                case None:
                    time.sleep(POLL_S)
                case Completed():
                    return self._completed()
                case TrainerStopped():
                    done, steps = self._run.checkpoint_step or 0, self._config.train.steps
                    cause = f"the trainer was asked to stop, not by this job, at step {done} of {steps}"
                    return self._requeue(cause, 1)
                case Failed() as failed:
                    return self._failed(failed)

    def _completed(self) -> int:
        self._record("completed", f"{self._config.train.steps} steps done")
        print_line(f"completed {self._config.train.steps} steps; the final model is {self._run.final_model}")
        try:
            from dppo_megatron.report.report import write_report  # matplotlib may be missing

            print_line(f"report: {write_report(self._run.root)}")
        except Exception as error:  # the run is complete without a report
            print_line(f"no report: {error}; `dppo-megatron report {self._run.root}` tries again")
        return 0

    def _stop_early(self) -> int:
        """Save a checkpoint while the engines serve, because of the time limit or a user's signal. Requeue or end."""
        name = signal.Signals(self._signal).name
        timeout_s = 0.6 * self._config.slurm.signal_lead_s  # the rest is for ending the steps
        print_line(f"{name}: requesting a checkpoint from the trainer")
        for trainer in self._driver.trainers:
            trainer.request_stop()
            if not trainer.wait(timeout_s):
                print_line(f"the trainer did not stop within {timeout_s:.0f} s; the checkpoint before this one remains")
                trainer.kill()
        if self._driver.trained:
            return self._watch()
        if self._signal == STOP:
            self._record("stopped", f"asked to by {name}")
            print_line("stopped; submit the config again with --resume to continue")
            return 128 + STOP
        return self._requeue(TIME_LIMIT, 128 + REQUEUE)

    def _cancelled(self) -> int:
        """Record that Slurm is ending the job with all steps; return the exit code."""
        name = signal.Signals(self._signal).name
        self._record("stopped", f"{name}: cancelled, or ended by Slurm")
        print_line(f"{name}: the job is being ended; the bank and the last checkpoint stay for --resume")
        return 128 + self._signal

    def _failed(self, failed: Failed[JobStep]) -> int:
        code = failed.process.poll()
        error = None if code is None else self._errors.first_of(failed.process.name)
        cause = "; ".join(filter(None, (failed.cause, error)))
        print_line(f"{cause}; logs in {self._run.logs}")
        return self._requeue(cause, code or 1)

    def _still_running(self) -> bool:
        """Return False if Slurm is ending the job, because of a cancellation or a failed node.

        A requeue would undo the cancellation.
        """
        try:
            states = {job.state for job in queue.jobs([self._allocation.job_id])}
        except queue.SlurmError as error:
            print_line(f"cannot query the job's state: {error}")
            return not self._wait_for_cancellation()
        return states == {"RUNNING"}

    def _requeue(self, cause: str, code: int, without: tuple[str, ...] = ()) -> int:
        """End the attempt and requeue the job; Slurm then ends this script.

        code: exit code if the job is not requeued.
        without: nodes that the job must not get again.
        """
        self._driver.end_all()
        if self._signal in CANCELLED:
            return self._cancelled()
        if not self._still_running():
            self._record("stopped", f"{cause}, while Slurm was ending the job")
            return code
        attempts, limit = self._attempts.without_progress(), self._config.slurm.max_restarts
        if attempts > limit:
            reason = f"{attempts} attempts in a row saved no new checkpoint, slurm.max_restarts = {limit}"
            self._record("failed", f"{cause}; {reason}")
            print_line(f"not restarted after: {cause}; {reason}. Remove the cause, then submit again with --resume")
            return code
        self._record("requeued", cause, excluded=without)
        print_line(f"requeued after: {cause}")
        try:
            queue.retry_until_answered(
                lambda: queue.requeue(self._allocation.job_id),
                self._config.slurm.signal_lead_s,
                give_up=lambda: self._signal in CANCELLED,
            )
            if without:
                self._exclude(without)
        except queue.SlurmError as error:
            if not self._wait_for_cancellation():  # a successful requeue may end the command that requested it
                self._record("failed", f"{cause}; could not be requeued: {error}")
                print_line(f"could not be requeued: {error}")
        return code

    def _exclude(self, nodes: tuple[str, ...]) -> None:
        """Exclude nodes from the requeued job. Call it after the requeue, because Slurm changes only waiting jobs.

        Slurm ends this script seconds later.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            for job in self._allocation.components:
                queue.retry_until_answered(partial(queue.exclude, job, nodes), EXCLUDE_S)
            print_line(f"excluded: {', '.join(nodes)}; with too few other nodes the job waits in the queue")
        except queue.SlurmError as error:
            print_line(f"{', '.join(nodes)} could not be excluded: {error}")

    def _wait_for_cancellation(self) -> bool:
        """Return whether Slurm signals within `SIGNAL_S` that it is ending the job."""
        return wait_until(lambda: self._signal in CANCELLED, SIGNAL_S, POLL_S)

    def _record(self, event: Event, cause: str, **nodes: tuple[str, ...]) -> None:
        self._attempts.record(event, cause, job=self._allocation.job_id, restart=self._allocation.restart, **nodes)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signal = number


def print_line(line: str) -> None:
    """Print a line to the job's output, which Slurm writes."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
