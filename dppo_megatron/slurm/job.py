"""`dppo-megatron slurm-job`: drives the job steps of a run from the batch script, on the job's first node.

Starts one srun per engine, one for the orchestrator and one for all trainer ranks, and watches them. However one of
them ends, the job ends, requeues or completes: it never idles.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from dppo_megatron.checks import check_run_dir, load_config
from dppo_megatron.checks.slurm import problems as slurm_problems
from dppo_megatron.common.process import exit_reason
from dppo_megatron.config import Config, ConfigError, save_resolved, with_absolute_paths
from dppo_megatron.fleet.registry import forget, forget_all
from dppo_megatron.launch.restarts import RestartedServer, RestartPolicy
from dppo_megatron.run_dir import RunDir

from . import queue
from .allocation import Allocation
from .attempts import TIME_LIMIT, AttemptLog, Event
from .log_errors import NewErrors
from .placement import StepPlan, check_plan, engine_plans, node_violations, orchestrator_plan, trainer_plan
from .step import KILL_S, Step
from .submit import refuse_second_job

POLL_S = 0.1
GRACE_S = 10.0
SIGNAL_S = 5.0
REFUSED = 2  # exit code of a `ConfigError`
REQUEUE, STOP = signal.SIGUSR1, signal.SIGUSR2
CANCELLED = (signal.SIGTERM, signal.SIGINT)


def run_job(config_file: Path, overrides: Sequence[str], *, resume: bool) -> int:
    """Exit code of the batch script: 0 when the run completed, else that of the first step that failed.

    An attempt after the first continues under the settings that the first one saved, whatever became of the file.
    """
    allocation = Allocation.of_this_job()
    note = Path(f"slurm-{allocation.job_id}.run")  # a later attempt knows the job's number, not CONFIG
    source = config_file
    if allocation.restart and note.exists():
        source, overrides = Path(note.read_text()), ()
    config = with_absolute_paths(load_config(source, overrides))
    run = RunDir(config.run.dir)
    resume = resume or allocation.restart > 0
    if violations := slurm_problems(config) + node_violations(config, allocation):
        raise ConfigError(str(source), violations)
    check_run_dir(config, str(source), resume=resume)
    queue.retry_until_answered(lambda: refuse_second_job(run, allocation.job_id), config.slurm.signal_lead_s)
    run.root.mkdir(parents=True, exist_ok=True)
    save_resolved(config, run.config)
    if config_file.absolute() == run.config:
        note.unlink(missing_ok=True)  # of another cluster's job
    else:
        _leave(note, str(run.config))
    return Job(config, allocation, resume=resume).run()


def _leave(note: Path, text: str) -> None:
    try:
        note.write_text(text)
    except OSError as error:
        raise queue.SlurmError(
            f"{note.absolute()}: cannot be written ({error}), and without it a requeued job could not find its run; "
            "submit from a directory that the nodes can write to"
        ) from None


class Job:
    """One attempt of the run's job, from the first step to the exit code."""

    def __init__(self, config: Config, allocation: Allocation, *, resume: bool):
        self._config = config
        self._allocation = allocation
        self._resume = resume
        self._run = RunDir(config.run.dir)
        self._attempts = AttemptLog(self._run)
        self._errors = NewErrors(self._run.logs)
        self._signal: int | None = None
        self._servers: list[RestartedServer] = []  # run until ended
        self._orchestrator: Step | None = None
        self._trainer: Step | None = None

    def run(self) -> int:
        for number in (REQUEUE, STOP, *CANCELLED):
            signal.signal(number, self._on_signal)
        first = self._allocation.restart == 0
        cause = "submitted" if first else self._attempts.why_restarted()
        nodes = tuple(name for group in self._allocation.groups for name in group)
        self._record("started", cause, nodes)
        say(f"run directory {self._run.root} on {', '.join(nodes)} ({cause}); logs in {self._run.logs}")
        forget_all(self._run)
        try:
            if first and (code := self._check()):
                return code
            if self._signal is None:
                self._start()
            return self._watch()
        finally:
            self._end_all()

    def _check(self) -> int:
        """What can be known to be wrong is said before many GPUs wait for a model to load."""
        step = self._step(check_plan(self._config, self._allocation))
        while (code := step.poll()) is None and self._signal is None:
            time.sleep(POLL_S)
        step.kill()
        if code == REFUSED:
            self._record("failed", "the config was refused")
            return code
        return self._failed(step, code) if code else 0

    def _start(self) -> None:
        self._servers = [self._server(plan) for plan in engine_plans(self._config, self._allocation)]
        if self._config.samples:
            self._orchestrator = self._step(orchestrator_plan(self._allocation))
        self._trainer = self._step(trainer_plan(self._config, self._allocation, resume=self._resume))

    def _step(self, plan: StepPlan) -> Step:
        return Step(self._config, self._run.config, plan, self._allocation)

    def _server(self, plan: StepPlan) -> RestartedServer:
        """An engine that ends starts again on its node, as on one machine."""
        return RestartedServer(
            start=lambda: self._step(plan),
            withdraw=lambda: forget(self._run, plan.name),
            serves=lambda: (self._run.services / f"{plan.name}.json").exists(),
            policy=RestartPolicy(self._config.engine.restarts),
        )

    @property
    def _workers(self) -> list[Step]:
        """Those that end by themselves when their work is done."""
        return [step for step in (self._trainer, self._orchestrator) if step is not None]

    def _watch(self) -> int:
        while True:
            if self._signal in CANCELLED:
                return self._cancelled()
            if self._signal is not None and not self._trained():
                return self._stop_early()
            for step in self._workers:
                if code := step.poll():
                    return self._failed(step, code)
            if self._trainer_ended() and not self._trained():
                done, steps = self._run.checkpoint_step or 0, self._config.train.steps
                return self._requeue(f"the trainer was asked to stop, not by this job, at step {done} of {steps}", 1)
            if all(step.poll() == 0 for step in self._workers):
                return self._completed()
            for server in self._servers:
                if news := server.check(time.monotonic()):
                    say(news)
                if server.failed:
                    return self._failed(server.child, server.child.poll() or 1)
            time.sleep(POLL_S)

    def _trained(self) -> bool:
        """Whether the trainer ended with its last step done: what remains takes no time."""
        return self._trainer_ended() and self._run.done(self._config.train.steps)

    def _trainer_ended(self) -> bool:
        return self._trainer is not None and self._trainer.poll() == 0

    def _completed(self) -> int:
        self._record("completed", f"{self._config.train.steps} steps done")
        say(f"completed {self._config.train.steps} steps; the final model is {self._run.final_model}")
        try:
            from dppo_megatron.observability.report import write_report  # the environment may lack what it draws with

            say(f"report: {write_report(self._run.root)}")
        except Exception as error:  # whatever is wrong with it, the run is complete
            say(f"no report: {error}; `dppo-megatron report {self._run.root}` tries again")
        return 0

    def _stop_early(self) -> int:
        """The time limit is near, or somebody asked: checkpoint while the engines still serve, then requeue or end."""
        name = signal.Signals(self._signal).name
        patience = 0.6 * self._config.slurm.signal_lead_s  # the rest is for ending the steps
        say(f"{name}: asking the trainer for a checkpoint")
        if self._trainer is not None:
            self._trainer.ask_to_stop()
            if not self._trainer.wait(patience):
                say(f"the trainer did not stop within {patience:.0f} s; the checkpoint before this one remains")
        if self._trained():
            return self._watch()
        if self._signal == STOP:
            self._record("stopped", f"asked to by {name}")
            say("stopped; submit the config again with --resume to continue")
            return 128 + STOP
        return self._requeue(TIME_LIMIT, 128 + REQUEUE)

    def _cancelled(self) -> int:
        """Slurm is ending the job, steps included."""
        name = signal.Signals(self._signal).name
        self._record("stopped", f"{name}: cancelled, or ended by Slurm")
        say(f"{name}: the job is being ended; the bank and the last checkpoint stay for --resume")
        return 128 + self._signal

    def _failed(self, step: Step, code: int) -> int:
        cause = f"{step.name}: {exit_reason(code)}"
        if error := self._errors.first_of(step.name):
            cause += f" ({error})"
        say(f"{cause}; logs in {self._run.logs}")
        return self._requeue(cause, code or 1)

    def _still_running(self) -> bool:
        """False when Slurm is ending the job, because it was cancelled or a node is gone: a requeue would undo that."""
        try:
            states = {job.state for job in queue.jobs([self._allocation.job_id])}
        except queue.SlurmError as error:
            say(f"cannot ask for the job's state: {error}")
            return not self._being_ended()
        return states == {"RUNNING"}

    def _requeue(self, cause: str, code: int) -> int:
        """`code` is the exit code when the job is not requeued; when it is, Slurm ends this script."""
        self._end_all()
        if self._signal in CANCELLED:
            return self._cancelled()
        if not self._still_running():
            self._record("stopped", f"{cause}, while Slurm was ending the job")
            return code
        attempts, most = self._attempts.without_progress(), self._config.slurm.max_restarts
        if attempts > most:
            why = f"{attempts} attempts in a row saved no new checkpoint, slurm.max_restarts = {most}"
            self._record("failed", f"{cause}; {why}")
            say(f"not restarted after: {cause}; {why}. Mend the cause, then submit the config again with --resume")
            return code
        self._record("requeued", cause)
        say(f"requeued after: {cause}")
        try:
            queue.retry_until_answered(
                lambda: queue.requeue(self._allocation.job_id),
                self._config.slurm.signal_lead_s,
                give_up=lambda: self._signal in CANCELLED,
            )
        except queue.SlurmError as error:
            if not self._being_ended():  # a requeue that succeeds may end the command that asked for it
                self._record("failed", f"{cause}; could not be requeued: {error}")
                say(f"could not be requeued: {error}")
        return code

    def _being_ended(self) -> bool:
        """Whether Slurm's signal arrives within some seconds."""
        deadline = time.monotonic() + SIGNAL_S
        while self._signal not in CANCELLED and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self._signal in CANCELLED

    def _record(self, event: Event, cause: str, nodes: tuple[str, ...] = ()) -> None:
        self._attempts.record(event, cause, job=self._allocation.job_id, restart=self._allocation.restart, nodes=nodes)

    def _end_all(self) -> None:
        """Asks every step, then kills what is left after the grace; Slurm ends the rest with the job."""
        steps = [*self._workers, *(server.child for server in self._servers)]
        for act, patience in ((Step.ask_to_stop, GRACE_S), (Step.kill, KILL_S)):
            for step in steps:
                act(step)
            deadline = time.monotonic() + patience
            for step in steps:
                step.wait(max(0.0, deadline - time.monotonic()))

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signal = number


def say(line: str) -> None:
    """To the job's output, which Slurm writes."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
