"""`dppo-megatron engine`: runs one inference server in the foreground and announces it once it answers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import time
from pathlib import Path

from dppo_megatron.common.process import end_with_parent, exit_reason
from dppo_megatron.config import Config
from dppo_megatron.engines.kinds import build_engine, server_command, server_environment
from dppo_megatron.engines.protocol import EngineError
from dppo_megatron.errors import ExpectedError
from dppo_megatron.fleet.engine_checks import check_health
from dppo_megatron.fleet.registry import forget, free_port, port_in_use, register
from dppo_megatron.observability.logs import setup_logging
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.published import PublishedPolicy

from .quantized import made_start_model

log = logging.getLogger(__name__)

POLL_S = 0.1
PATIENCE = 2  # times engine.health_failures: to the pool a dead engine may come back, killing one is final


class EngineStartError(ExpectedError, RuntimeError):
    """The server ended, or did not answer, while starting."""


class EngineFrozen(ExpectedError, RuntimeError):
    """The server runs and does not answer; it was killed."""


def run_engine(config: Config, index: int) -> int:
    """Starts engine `index`, registers it as `engine-<index>` when healthy, and returns the server's exit code.

    The server joins this process's session and output; SIGTERM and SIGINT are passed on. Raises
    `EngineStartError` when it dies or stays silent for `engine.start_timeout_s` while starting, and `EngineFrozen`
    when later it answers no health probe; it is killed then.
    """
    run = RunDir(config.run.dir)
    setup_logging(f"engine-{index}", run.root)
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
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.terminate())
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


def _policy_to_serve(config: Config, run: RunDir, index: int) -> tuple[Path, int]:
    """The policy published last, so that an engine that restarts is current; the start model as 0 where there is no
    directory of it: none was published yet, or it was broadcast and the trainer sends it again."""
    published = PublishedPolicy.read(run.published)
    if published is None or published.path is None:
        return made_start_model(config, index), 0
    return Path(published.path), published.version


def _wait_healthy(config: Config, url: str, server: subprocess.Popen) -> None:
    async def wait() -> None:
        deadline = time.monotonic() + config.engine.start_timeout_s
        engine = build_engine(config, url)
        try:
            while True:
                if (code := server.poll()) is not None:
                    raise EngineStartError(f"the server at {url} ended while starting ({exit_reason(code)})")
                try:
                    await engine.health()
                    return
                except EngineError:
                    pass
                if time.monotonic() > deadline:
                    server.kill()
                    raise EngineStartError(
                        f"the server at {url} did not answer within {config.engine.start_timeout_s:.0f} s "
                        "(engine.start_timeout_s)"
                    )
                await asyncio.sleep(POLL_S)
        finally:
            await engine.close()

    asyncio.run(wait())


async def _watch(config: Config, url: str, server: subprocess.Popen) -> int:
    """The server's exit code; kills one that froze, for only a dead one can be started again."""
    settings = config.engine
    engine = build_engine(config, url)
    silent, due = 0, time.monotonic()
    try:
        while (code := server.poll()) is None:
            await asyncio.sleep(POLL_S)
            if time.monotonic() < due:
                continue
            try:
                await check_health(engine, config)
                silent = 0
            except EngineError as error:
                silent += 1
                if silent >= PATIENCE * settings.health_failures and server.poll() is None:
                    server.kill()
                    server.wait()
                    raise EngineFrozen(
                        f"the server at {url} was killed: {silent} health probes in a row failed "
                        f"({PATIENCE} x engine.health_failures), the last one: {error}"
                    ) from None
            due = time.monotonic() + settings.health_interval_s
        return code
    finally:
        await engine.close()
