"""`dppo-megatron engine`: runs an inference server in the foreground and registers it once it answers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from dppo_megatron.common.environment import child_environment
from dppo_megatron.common.files import write_json
from dppo_megatron.common.process import exit_reason, with_this_process
from dppo_megatron.common.retry import RetryBudget, retry_async, wait_until
from dppo_megatron.config import Config
from dppo_megatron.config.section import host_and_port
from dppo_megatron.convert.job import ConversionWorker, convert
from dppo_megatron.convert.to_hf import ToHF
from dppo_megatron.errors import ExpectedError
from dppo_megatron.hf.peft import ADAPTER_CONFIG
from dppo_megatron.report.logs import SERVER_READY, SERVER_START, SERVER_STOP, root_cause, setup_logging
from dppo_megatron.rollout.engines.guard.asgi import RefusedPath, inside_roots
from dppo_megatron.rollout.engines.kinds import build_engine, kind_of, server_environment
from dppo_megatron.rollout.engines.protocol import EngineError
from dppo_megatron.rollout.engines.secret import make_secret
from dppo_megatron.rollout.engines.serving import Node, start_model
from dppo_megatron.rollout.fleet.engine_checks import while_healthy
from dppo_megatron.rollout.fleet.registry import engine_log, forget, free_port, port_in_use, read_when_written, register
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.delta import chain, is_delta
from dppo_megatron.weights.published import PublishedPolicy

log = logging.getLogger(__name__)

POLL_S = 0.1
STOP_S = 15.0  # a stopping server waits for the last requests, but a dead engine core does not answer
# Multiplies engine.health_failures. The pool avoids an engine earlier, because the engine may answer again.
FAILURES_BEFORE_KILL = 2


class EngineStartError(ExpectedError, RuntimeError):
    """Raised when the server ended, or did not answer, while starting."""


class EngineFrozen(ExpectedError, RuntimeError):
    """Raised when the server ran without answering and was killed."""


class StartModelTimeout(ExpectedError, TimeoutError):
    """Raised when engine 0 did not make the quantized model in time."""


@dataclass(frozen=True, slots=True)
class EngineStart:
    """Contains the start parameters for all nodes of an engine.

    Node 0 decides, because nodes that read the published policy at different times could load different policies.
    """

    model: str  # directory
    version: int  # policy version
    port: int  # HTTP port of the server
    host: str  # rendezvous address on node 0
    rendezvous_port: int


class Servers:
    """Manages an engine's server processes on this machine. If any server ends, the others cannot serve either."""

    def __init__(self, processes: Sequence[subprocess.Popen]):
        self._processes = processes
        self.pid = processes[0].pid
        self.stopping = False  # whether the servers were asked to end

    @classmethod
    def start(cls, config: Config, start: EngineStart, nodes: Sequence[int]) -> Servers:
        """Start the servers for `nodes` in this process's session, with this process's output."""
        environment, processes = child_environment(server_environment(config, start.version), server=True), []
        if dropped := sorted(os.environ.keys() - environment.keys()):
            log.info("variables that the servers do not get (engine.env sets some): %s", ", ".join(dropped))
        for node in nodes:
            line = command(config, start, node)
            log.info("%s %d: %s", SERVER_START, node, " ".join(line))
            tied = with_this_process()
            processes.append(subprocess.Popen(line, stdin=subprocess.DEVNULL, env=environment, preexec_fn=tied))
        return cls(processes)

    def poll(self) -> int | None:
        """Return the exit code of the first server that ended, negative for a signal, or None while all run."""
        return next((code for process in self._processes if (code := process.poll()) is not None), None)

    def terminate(self) -> None:
        self.stopping = True
        for process in self._processes:
            process.terminate()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def wait(self) -> None:
        for process in self._processes:
            process.wait()


def command(config: Config, start: EngineStart, node: int) -> list[str]:
    """Return the command line for the server on `node`."""
    place = Node(node, start.host, start.rendezvous_port) if config.engine.nodes > 1 else None
    return kind_of(config).command(config, start.port, Path(start.model), start.version, place)


def run_engine(config: Config, index: int, *, node: int | None = None, meeting: str = "") -> int:
    """Start engine `index`, register it as `engine-<index>` when healthy, and return the server's exit code.

    If the engine has several nodes, all servers run on this machine, or with `node` only that node's server. The call
    on every node must then have the same `meeting`, a name that no other engine start uses. Servers join this process's
    session and output. SIGTERM and SIGINT end the servers. If any server ends, all end.

    Raises `EngineStartError` if a server ends while starting or the engine does not answer within
    `engine.start_timeout_s`. Raises `EngineFrozen` if the engine later fails too many health checks in a row, and
    `ServiceTimeout` if node 0 does not begin. All servers are dead after an error.
    """
    run = RunDir(config.run.dir)
    run.make()
    setup_logging(engine_log(index, node or 0), run.root)
    make_secret(config)
    path = run.services / f"{meeting}.json"
    if node:
        timeout_s, log_0 = config.engine.start_timeout_s, run.log(engine_log(index, 0))
        start = read_when_written(EngineStart, path, timeout_s, "engine.start_timeout_s", log_0)
    else:
        start = _start(config, run, index)
        if node is not None:
            write_json(path, asdict(start))
    servers = Servers.start(config, start, range(config.engine.nodes) if node is None else [node])
    _pass_on_signals(servers)
    try:
        code = _wait_for_end(servers) if node else _serve(config, run, index, start, servers)
    finally:
        servers.kill()
        servers.wait()
    log.info("engine-%d: the server ended (%s)", index, exit_reason(code))
    if code == 0 and config.engine.nodes > 1 and not servers.stopping:
        return 1  # a node exits with 0 when another node has failed
    return code if code >= 0 else 128 - code


def _start(config: Config, run: RunDir, index: int) -> EngineStart:
    host = config.engine.host
    port = config.engine.port + index if config.engine.port else free_port(host)
    if port_in_use(host, port):
        raise EngineStartError(f"engine.port = {port}: already in use on {host}; choose another or 0 for a free one")
    model, version = _policy_to_serve(config, run, index)
    return EngineStart(str(model), version, port, host, free_port(host) if config.engine.nodes > 1 else 0)


def _serve(config: Config, run: RunDir, index: int, start: EngineStart, server: Servers) -> int:
    """Register the server from the first answer until it ends; return the server's exit code."""
    url, started = f"http://{host_and_port(config.engine.host, start.port)}", time.monotonic()
    _wait_healthy(config, url, server, run.log(engine_log(index, 0)))
    log.info("engine-%d %s %s after %.1f s", index, SERVER_READY, url, time.monotonic() - started)
    register(run, f"engine-{index}", url, server.pid)
    try:
        return asyncio.run(_watch(config, url, server))
    finally:
        forget(run, f"engine-{index}", server.pid)


def _wait_for_end(server: Servers) -> int:
    while (code := server.poll()) is None:
        time.sleep(POLL_S)
    return code


def _pass_on_signals(server: Servers) -> None:
    """Make SIGTERM and SIGINT end the server, by SIGKILL if it takes longer than `STOP_S`."""

    def stop(number: int, _: object) -> None:
        log.info("%s %s", signal.Signals(number).name, SERVER_STOP)
        server.terminate()
        kill = threading.Timer(STOP_S, server.kill)
        kill.daemon = True
        kill.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _policy_to_serve(config: Config, run: RunDir, index: int) -> tuple[Path, int]:
    """Return model directory and version of the last published policy, so that a restarted engine is current.

    Without a whole-model directory, returns the start model as version 0. This happens before the first publish, and
    for an adapter, which the run loads later. It also happens after a broadcast, which the trainer sends again, and
    if a resumed run publishes in another way.
    """
    published = PublishedPolicy.read(run.published)
    if published is None or published.path is None or config.weight_sync.lora == "adapter":
        return ensure_start_model(config, index), 0
    path = Path(published.path)
    if (path / ADAPTER_CONFIG).is_file():
        return ensure_start_model(config, index), 0
    try:
        inside_roots(str(path), [str(start_model(config)), str(path.parent)])
    except RefusedPath as error:
        raise EngineStartError(f"policy {published.version}: {error}") from None
    if is_delta(path):  # the run makes the engine load the version
        path, _ = chain(path)
        return path, run.version_of(path)
    return path, published.version


def ensure_start_model(config: Config, index: int) -> Path:
    """Return the directory that engine `index` starts with. Engine 0 makes a quantized copy; other engines wait for it.

    Continues an interrupted copy. Raises `ModelError` as `convert` does, and `StartModelTimeout` if engine 0 did not
    make the copy within `engine.start_timeout_s`.
    """
    directory, quantization = start_model(config), config.engine.quantization
    if directory == config.model.path or directory.exists():
        return directory
    if index == 0:
        log.info("quantising %s to %s (engine.quantization = %s)", config.model.path, directory, quantization)
        build = partial(ToHF, config.model.path, directory, config.model.path, quantization=quantization)
        convert(build, resume=True, worker=ConversionWorker())
    elif not wait_until(directory.exists, config.engine.start_timeout_s, POLL_S):
        raise StartModelTimeout(
            f"engine-0 did not quantise {config.model.path} to {directory} within "
            f"{config.engine.start_timeout_s:.0f} s (engine.start_timeout_s); see its log"
        )
    return directory


def _wait_healthy(config: Config, url: str, server: Servers, output: Path) -> None:
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
        cause = "".join(f"; {exception}" for exception in (root_cause(output),) if exception)
        if (code := server.poll()) is not None:
            raise EngineStartError(f"the server at {url} ended while starting ({exit_reason(code)}){cause}") from None
        server.kill()
        raise EngineStartError(
            f"the server at {url} did not answer within {timeout_s:.0f} s (engine.start_timeout_s); at last: {error}"
            f"{cause}"
        ) from None


async def _watch(config: Config, url: str, server: Servers) -> int:
    """Return the server's exit code. Kills a frozen server, because the driver restarts only engines that ended."""

    async def ended() -> int:
        while (code := server.poll()) is None:
            await asyncio.sleep(POLL_S)
        return code

    failures = FAILURES_BEFORE_KILL * config.engine.health_failures
    engine = build_engine(config, url)
    try:
        return await while_healthy(engine, config, ended(), failures)
    except EngineError as error:
        if (code := server.poll()) is not None:
            return code
        server.kill()
        server.wait()
        raise EngineFrozen(
            f"the server at {url} was killed: {failures} health checks in a row failed "
            f"({FAILURES_BEFORE_KILL} x engine.health_failures), the last one: {error}"
        ) from None
    finally:
        await engine.close()
