"""Starts engines for an evaluation, a study or a certificate on this machine, and ends them after use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dppo_megatron.common.process import Child, exit_reason
from dppo_megatron.config import Config, save_resolved
from dppo_megatron.report.logs import last_lines
from dppo_megatron.rollout.fleet.registry import engine_urls
from dppo_megatron.run_dir import RunDir

from .driver import GRACE_S, LAST_LINES
from .engine import EngineStartError
from .local_processes import LocalLauncher, engine_plans


def with_last_lines(message: str, process: Child) -> str:
    """Return `message` with the last lines of the process log."""
    lines = last_lines(process.log, LAST_LINES)
    return "\n  ".join((f"{message}. Its last lines ({process.log}):", *lines))


@contextmanager
def running_engines(config: Config, *, trains: bool = True) -> Iterator[list[str]]:
    """Yield the engine URLs for `config`, once all engines answer. On exit or error, end the engines started here.

    Their config, logs and registrations are in `run.dir`. `trains`: trainer ranks use the first GPUs. Raises
    `EngineStartError` with the last log lines if an engine ends while starting. Raises `ServiceTimeout` naming the
    engines that did not register within `engine.start_timeout_s`.
    """
    run = RunDir(config.run.dir)
    run.make()
    save_resolved(config, run.config)
    launcher, servers = LocalLauncher(run), list[Child]()

    def check() -> None:
        for server in servers:
            if (code := server.poll()) is not None:
                failure = f"{server.name} ended while starting: {exit_reason(code)}"
                raise EngineStartError(with_last_lines(failure, server))

    try:
        for plan in engine_plans(config, trains=trains):
            servers.append(launcher.start(plan))
        yield engine_urls(config, run, check)
    finally:
        launcher.end(servers, GRACE_S)
