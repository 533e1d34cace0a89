"""`dppo-megatron engine`: runs one inference server in the foreground and registers it once it answers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from dppo_megatron.common.process import end_with_parent, exit_reason
from dppo_megatron.common.retry import RetryBudget, retry_async
from dppo_megatron.config import Config
from dppo_megatron.engines.kinds import build_engine, server_command, server_environment
from dppo_megatron.engines.protocol import EngineError
from dppo_megatron.engines.secret import make_secret
from dppo_megatron.errors import ExpectedError
from dppo_megatron.fleet.engine_checks import check_health
from dppo_megatron.fleet.registry import forget, free_port, port_in_use, register
from dppo_megatron.hf.peft import ADAPTER_CONFIG
from dppo_megatron.observability.logs import setup_logging
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.delta import chain, is_delta
from dppo_megatron.weights.published import PublishedPolicy

from .quantized import ensure_start_model

log = logging.getLogger(__name__)

POLL_S = 0.1
# A server that is asked to end waits for its last requests, and a dead engine core answers them no more.
STOP_S = 15.0
# Times engine.health_failures. The pool gives up on an engine earlier: it only avoids it, and it may answer again.
FAILURES_BEFORE_KILL = 2


class EngineStartError(ExpectedError, RuntimeError):
    """The server ended, or did not answer, while starting."""


class EngineFrozen(ExpectedError, RuntimeError):
    """The server runs and does not answer; it was killed."""


def run_engine(config: Config, index: int) -> int:
    """Starts engine `index`, registers it as `engine-<index>` when healthy, and returns the server's exit code.

    The server joins this process's session and output; SIGTERM and SIGINT end it. Raises `EngineStartError`
    when it ends while starting or does not answer within `engine.start_timeout_s`, and `EngineFrozen` when later it
    fails too many health checks in a row. In both cases it is dead then.
    """
    run = RunDir(config.run.dir)
    run.make()
    setup_logging(f"engine-{index}", run.root)
    make_secret(config)
    host = config.engine.host
    port = config.engine.port + index if config.engine.port else free_port(host)
    if port_in_use(host, port):
        raise EngineStartError(f"engine.port = {port}: already in use on {host}; choose another or 0 for a free one")
    url = f"http://{host}:{port}"
    model, version = _policy_to_serve(config, run, index)
    command = server_command(config, port, model, version)
    log.info("starting engine-%d: %s", index, " ".join(command))
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **server_environment(config, version)},
        preexec_fn=end_with_parent,
    )
    _pass_on_signals(server)
    started = time.monotonic()
    _wait_healthy(config, url, server)
    log.info("engine-%d answers at %s after %.1f s", index, url, time.monotonic() - started)
    register(run, f"engine-{index}", url, server.pid)
    try:
        code = asyncio.run(_watch(config, url, server))
    finally:
        forget(run, f"engine-{index}", server.pid)
    log.info("engine-%d: the server ended (%s)", index, exit_reason(code))
    return code if code >= 0 else 128 - code


def _pass_on_signals(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM and SIGINT end the server, by SIGKILL where it takes longer than `STOP_S`."""

    def stop(*_: object) -> None:
        server.terminate()
        kill = threading.Timer(STOP_S, server.kill)
        kill.daemon = True
        kill.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _policy_to_serve(config: Config, run: RunDir, index: int) -> tuple[Path, int]:
    """Model directory and version. The policy that was published last, so that an engine that restarts is current; the
    start model as version 0 where no directory holds all of it: none was published yet, or an adapter, which the run
    loads then, or it was broadcast, and the trainer sends it again. Also where the run went from one to the other."""
    published = PublishedPolicy.read(run.published)
    path = None if published is None or published.path is None else Path(published.path)
    if path is None or config.weight_sync.lora == "adapter" or (path / ADAPTER_CONFIG).is_file():
        return ensure_start_model(config, index), 0
    if is_delta(path):  # the run has it load what changed since
        path, _ = chain(path)
        return path, run.version_of(path)
    return path, published.version


def _wait_healthy(config: Config, url: str, server: subprocess.Popen) -> None:
    timeout_s = config.engine.start_timeout_s
    budget = RetryBudget(timeout_s=timeout_s, first_pause_s=POLL_S, longest_pause_s=POLL_S)

    async def wait() -> None:
        engine = build_engine(config, url)
        try:
            await retry_async(
                lambda _attempt: engine.health(), budget, on=EngineError, give_up=lambda: server.poll() is not None
            )
        finally:
            await engine.close()

    try:
        asyncio.run(wait())
    except EngineError as error:
        if (code := server.poll()) is not None:
            raise EngineStartError(f"the server at {url} ended while starting ({exit_reason(code)})") from None
        server.kill()
        raise EngineStartError(
            f"the server at {url} did not answer within {timeout_s:.0f} s (engine.start_timeout_s); at last: {error}"
        ) from None


async def _watch(config: Config, url: str, server: subprocess.Popen) -> int:
    """Exit code of the server. Kills one that froze: the run's driver restarts only engines that ended."""
    settings = config.engine
    engine = build_engine(config, url)
    failures, due = 0, time.monotonic()
    try:
        while (code := server.poll()) is None:
            await asyncio.sleep(POLL_S)
            if time.monotonic() < due:
                continue
            try:
                await check_health(engine, config)
                failures = 0
            except EngineError as error:
                failures += 1
                if failures >= FAILURES_BEFORE_KILL * settings.health_failures and server.poll() is None:
                    server.kill()
                    server.wait()
                    raise EngineFrozen(
                        f"the server at {url} was killed: {failures} health checks in a row failed "
                        f"({FAILURES_BEFORE_KILL} x engine.health_failures), the last one: {error}"
                    ) from None
            due = time.monotonic() + settings.health_interval_s
        return code
    finally:
        await engine.close()
