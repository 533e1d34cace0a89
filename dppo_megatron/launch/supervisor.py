"""`dppo-megatron train`: starts every process of a run on this machine, watches them, and leaves nothing behind."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

from dppo_megatron.checks.devices import engine_devices, visible_devices
from dppo_megatron.common.process import Child, exit_reason
from dppo_megatron.config import Config
from dppo_megatron.fleet.registry import engine_names, forget, forget_all, free_port
from dppo_megatron.observability.console import ProgressView
from dppo_megatron.observability.logs import append_line, last_lines
from dppo_megatron.run_dir import RunDir

from .restarts import RestartedServer, RestartPolicy

log = logging.getLogger(__name__)

POLL_S = 0.05
GRACE_S = 10.0
LAST_LINES = 25


def dppo_command(*arguments: str) -> list[str]:
    """This program under this interpreter, whatever is on PATH."""
    return [sys.executable, "-m", "dppo_megatron", *arguments]


class Supervisor:
    """Runs engines, orchestrator and trainer ranks as children until the trainer and the orchestrator are done.

    An engine that ends is started again and serves the newest published policy (`engine.restarts`). Any other failure
    ends the run: the others are stopped, the failing process's last lines are shown, and what the bank and the
    checkpoints hold stays for `--resume`.
    """

    def __init__(self, config: Config, *, resume: bool):
        self._config = config
        self._run = RunDir(config.run.dir)
        self._resume = resume
        self._workers: list[Child] = []  # end by themselves when their work is done
        self._trainers: list[Child] = []  # of the workers
        self._servers: list[RestartedServer] = []  # run until ended
        self._stop_signal: int | None = None

    def run(self) -> int:
        """Exit code: 0 when the run completed, 1 when a process failed, 128 + signal when stopped by one."""
        forget_all(self._run)
        handlers = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        view = ProgressView(self._config.train.steps)
        try:
            self._start()
            view.note(f"run directory {self._run.root}, logs in {self._run.logs}")
            return self._watch(view)
        finally:
            self._end_all()
            view.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _start(self) -> None:
        visible = visible_devices()
        for index, name in enumerate(engine_names(self._config)):
            devices = engine_devices(self._config, index, visible)
            env = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
            self._servers.append(self._server(name, ["engine", str(self._run.config), "--index", str(index)], env))
        resume = ["--resume"] if self._resume else []
        if self._config.samples:
            self._workers.append(self._child("orchestrator", ["orchestrator", str(self._run.config)]))
        world_size = self._config.parallel.world_size
        rendezvous = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            # Ranks that share a machine's cores must not each start a thread per core.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size))),
        }
        for rank in range(world_size):
            env = {**rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = ["trainer", str(self._run.config), *resume]
            self._trainers.append(self._child(f"trainer-{rank}", command, env))
        self._workers += self._trainers

    def _child(self, name: str, arguments: Sequence[str], env: dict[str, str] | None = None) -> Child:
        return Child(name, dppo_command(*arguments), self._run.log(name), env)

    def _server(self, name: str, arguments: Sequence[str], env: dict[str, str]) -> RestartedServer:
        return RestartedServer(
            start=lambda: self._child(name, arguments, env),
            withdraw=lambda: forget(self._run, name),
            serves=lambda: (self._run.services / f"{name}.json").exists(),
            policy=RestartPolicy(self._config.engine.restarts),
        )

    def _watch(self, view: ProgressView) -> int:
        while True:
            view.poll(self._run.metrics)
            if self._stop_signal is not None:
                name = signal.Signals(self._stop_signal).name
                view.note(f"{name}: stopping; resume with `dppo-megatron train {self._run.config} --resume`")
                return 128 + self._stop_signal
            for child in self._workers:
                if child.poll() not in (None, 0):
                    self._show_failure(view, child)
                    return 1
            if self._trainers_ended() and not self._run.done(self._config.train.steps):
                return self._asked_to_stop(view)
            if all(child.poll() == 0 for child in self._workers):
                view.poll(self._run.metrics)
                return 0
            for server in self._servers:
                if news := server.check(time.monotonic()):
                    self._tell(view, news)
                if server.failed:
                    self._show_failure(view, server.child)
                    return 1
            time.sleep(POLL_S)

    def _trainers_ended(self) -> bool:
        return all(child.poll() == 0 for child in self._trainers)

    def _asked_to_stop(self, view: ProgressView) -> int:
        """By a signal from elsewhere: the ranks have not failed, nor are they done."""
        done, steps = self._run.checkpoint_step or 0, self._config.train.steps
        self._tell(
            view,
            f"the trainer was asked to stop, not by this command, at step {done} of {steps}; "
            f"resume with `dppo-megatron train {self._run.config} --resume`",
        )
        return 1

    def _tell(self, view: ProgressView, news: str) -> None:
        """To whoever watches, and to a log that stays."""
        view.note(news)
        append_line(self._run.log("train"), news)

    def _show_failure(self, view: ProgressView, child: Child) -> None:
        self._tell(view, f"{child.name} ended: {exit_reason(child.poll())}. Its last lines ({child.log}):")
        for line in last_lines(child.log, LAST_LINES):
            view.note(f"  {line}")
        view.note(
            f"the run stopped; nothing in {self._run.bank} and {self._run.checkpoints} is lost. "
            f"Resume with `dppo-megatron train {self._run.config} --resume`"
        )

    def _end_all(self) -> None:
        """Workers first, so that nobody is left waiting for a server that is already gone."""
        for child in self._workers:
            child.signal(signal.SIGTERM)
        for child in (*self._workers, *self._servers):
            child.end(GRACE_S)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._stop_signal = number
