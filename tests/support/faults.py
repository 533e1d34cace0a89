"""Runs a command in the background, sends signals to processes, and changes an engine's replies by a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web

from dppo_megatron.bank import BankReader
from tests.support import runs

STEPS = 6
PROBES = {"health_interval_s": 0.5, "health_timeout_s": 2.0, "health_failures": 3}
LIMIT_FACTOR = 4  # wait limits assume two quiet cores; other machines are slower or busy
SLOWLY = {"lr": 1e-10}  # a step moves less than the last bit of most fp32 weights
NOTICED_S = 3 * (0.5 + 2.0)  # until a silent engine counts as dead: health_failures checks


def fault_config(task: Path, run_dir: Path, *, urls: list[str], **engine: Any) -> dict:
    """Return a config with six steps of four groups of four, one trainer rank, and responses long enough to disturb."""
    tree = runs.config_tree(task, run_dir, urls=tuple(urls))
    tree["parallel"] = {"world_size": 1, "timeout_s": 120}
    tree["rollout"]["max_response_tokens"] = 48
    tree["train"] = {"steps": STEPS, "updates_per_step": 2}
    tree["engine"] |= {**PROBES, "unavailable_timeout_s": 480.0, **engine}
    tree["run"]["stall_timeout_s"] = tree["engine"]["unavailable_timeout_s"]  # a restart must fit into both
    tree["checkpoint"] = {"every": 0}
    return tree


class Run:
    """Runs a command in the background, by default `dppo-megatron train`."""

    def __init__(self, tree: dict, directory: Path, *options: str, command: str = "train"):
        self.dir = Path(tree["run"]["dir"])
        self.secret = Path(tree["engine"].get("secret_file", self.dir / "secret"))
        self.output = directory / "out"
        self.process = runs.start(command, runs.write_config(tree, directory / "c.yaml"), *options, output=self.output)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: step in runs.steps_done(self.dir), f"step {step}", 120)

    def wait_for_log(self, process: str, text: str, timeout_s: float, times: int = 1) -> None:
        self.wait_until(lambda: self.logged(process, text) >= times, f"{text!r} in {process}.log", timeout_s)

    def logged(self, process: str, text: str) -> int:
        path = self.dir / "logs" / f"{process}.log"
        return path.read_text().count(text) if path.exists() else 0

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        longest_s = LIMIT_FACTOR * timeout_s
        deadline = time.monotonic() + longest_s
        while not condition():
            assert self.process.poll() is None, f"the run ended while waiting for {what}:\n{self.story()}"
            assert time.monotonic() < deadline, f"waited {longest_s:.0f} s in vain for {what}:\n{self.story()}"
            time.sleep(0.005)

    def wait_to_end(self, timeout_s: float) -> None:
        code = self.process.wait(LIMIT_FACTOR * timeout_s)
        assert code == 0, self.story()

    @contextlib.contextmanager
    def held(self):
        """Suspend the trainer, so that the run cannot end while everything else continues."""
        (trainer,) = [p for p in runs.descendants(self.process) if "dppo_megatron trainer" in command_line(p)]
        trainer.suspend()
        try:
            yield
        finally:
            trainer.resume()

    def engine_pid(self, name: str) -> int:
        return json.loads((self.dir / "services" / f"{name}.json").read_text())["pid"]

    def engine_url(self, name: str) -> str:
        return json.loads((self.dir / "services" / f"{name}.json").read_text())["url"]

    def total(self, metric: str) -> float:
        return sum(record.get(metric, 0) for record in runs.records(self.dir))

    def story(self) -> str:
        logs = [self.output, *sorted((self.dir / "logs").glob("*.log"))]
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in logs if path.exists())

    def check_equals(self, reference: Path) -> None:
        """Do `check_whole`, and compare the weights with the undisturbed run's weights."""
        self.check_whole()
        assert runs.weights_digest(self.dir) == runs.weights_digest(reference), self.story()

    def check_whole(self) -> None:
        """Check that every step was trained once, and every prompt was sampled once, by the policy of its step."""
        assert runs.steps_done(self.dir) == list(range(1, STEPS + 1))
        reader = BankReader(self.dir / "bank")
        assert reader.refresh() == STEPS * runs.GROUPS
        assert sorted(e.position for e in reader.entries(0, STEPS * runs.GROUPS)) == list(range(STEPS * runs.GROUPS))
        for index, entry in enumerate(reader.entries(0, STEPS * runs.GROUPS)):
            versions = {int(v) for rollout in reader.read(entry).rollouts for v in rollout.versions}
            assert versions == {index // runs.GROUPS}, "stale samples"

    def end(self) -> None:
        if self.process.poll() is None:
            runs.end_session(self.process)


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it is gone, or about to be
        return ""


def info(run: Run, url: str) -> dict:
    request = urllib.request.Request(f"{url}/dppo/info", headers={"Authorization": f"Bearer {run.secret.read_text()}"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)


def wait_while_generating(run: Run, url: str) -> None:
    """Wait until the engine at `url` has just begun to sample; later it may finish before a fault reaches it."""
    run.wait_until(lambda: info(run, url)["running"] == 0, "an idle engine", 60)
    run.wait_until(lambda: info(run, url)["running"] > 0, "a running request", 60)


def lose_a_request(run: Run, hurt: Callable[[int], None]) -> int:
    """Call `hurt(1)`, `hurt(2)`, … until the run sends a request again, and return the number of calls.

    On a busy machine the engine may have answered before a signal reaches it.
    """
    for times in range(1, 4):
        hurt(times)
        if run.logged("orchestrator", "sending a request again"):
            return times
    raise AssertionError(f"the engine had no request in any of {times} attempts:\n{run.story()}")


@contextlib.contextmanager
def frozen(pid: int, when: Callable[[], None] = lambda: None):
    """Suspend the server and child processes as soon as `when` returns."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]  # first: the state after `when` ends soon
    when()
    for member in family:
        member.suspend()
    try:
        yield
    finally:
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was killed
                member.resume()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


Hook = Callable[[str, bytes, Callable[..., Awaitable[bytes]]], Awaitable[bytes | None]]


class Proxy:
    """Proxies the engine at `url` in a separate thread.

    `hook(path, body, forward)` returns the reply's body, or None to close the connection. It may call `forward` for the
    engine's reply, also with another path or body. The status is that reply's status, without `forward` 200. `seen`
    lists the requested paths in order.
    """

    def __init__(self, url: str, hook: Hook):
        self._target = url
        self._hook = hook
        self.seen: list[str] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()

    async def _start(self) -> None:
        connector = aiohttp.TCPConnector(keepalive_timeout=2.0)  # shorter than a server's: reused ones are open
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._ready.set()

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request.path)
        body = await request.read()
        status = 200

        async def forward(path: str = request.path, content: bytes = body) -> bytes:
            nonlocal status
            kept = {
                name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers
            }
            async with self._session.request(
                request.method, self._target + path, data=content or None, headers=kept
            ) as reply:
                status = reply.status
                return await reply.read()

        try:
            answer = await self._hook(request.path, body, forward)
        except aiohttp.ClientError:
            answer = None  # the engine is gone, so close this connection, too
        if answer is None:
            if request.transport is not None:  # else the client has already closed the connection
                request.transport.abort()
            return web.Response(status=500)
        return web.Response(body=answer, status=status)
