"""The engine command's watch over its server: a frozen one is killed, one that ended is reported."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock

import httpx
import pytest

from dppo_megatron.rollout.engines.protocol import EngineTimeout
from dppo_megatron.rollout.fleet.registry import free_port
from dppo_megatron.run.launch import engine as launched
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.delta import write_base
from dppo_megatron.weights.published import PublishedPolicy
from tests.support.configs import make_config

SETTINGS = SimpleNamespace(
    engine=SimpleNamespace(health_interval_s=0.05, health_timeout_s=0.3, health_failures=2),
    weight_sync=SimpleNamespace(timeout_s=20),
)


class HttpEngine:
    """A client with the methods that the watch needs."""

    updating_s = None

    def __init__(self, url):
        self.url = url
        self._http = httpx.AsyncClient(timeout=None)

    async def health(self):
        try:
            await self._http.get(self.url)
        except httpx.TransportError as error:
            raise EngineTimeout(str(error)) from None

    async def info(self):
        return SimpleNamespace(updating_s=self.updating_s)

    async def close(self):
        await self._http.aclose()


@pytest.fixture
def server(monkeypatch):
    """(url, process) of an HTTP server that answers."""
    monkeypatch.setattr(launched, "build_engine", lambda config, url: HttpEngine(url))
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            httpx.get(url)
            break
        except httpx.TransportError:
            time.sleep(0.05)
    yield url, process
    process.kill()
    process.wait()


def watch(url, process, act):
    """Outcome of the watch over `process`, on which `act` is done after it was seen to live."""

    async def main():
        asyncio.get_running_loop().call_later(0.5, act)
        return await launched._watch(SETTINGS, url, process)

    return asyncio.run(main())


def test_a_frozen_server_is_killed(server):
    url, process = server
    with pytest.raises(launched.EngineFrozen, match=r"4 health checks in a row failed .*health_failures"):
        watch(url, process, lambda: os.kill(process.pid, signal.SIGSTOP))
    assert process.poll() == -signal.SIGKILL


@pytest.mark.slow
def test_a_pause_is_survived(server):
    url, process = server

    def pause():
        os.kill(process.pid, signal.SIGSTOP)
        loop = asyncio.get_running_loop()
        loop.call_later(0.5, os.kill, process.pid, signal.SIGCONT)
        loop.call_later(2.0, process.terminate)

    assert watch(url, process, pause) == -signal.SIGTERM


@pytest.mark.parametrize("seconds", [19.0, 21.0])
def test_one_that_updates_its_weights_is_killed_only_when_that_takes_too_long(server, monkeypatch, seconds):
    url, process = server
    monkeypatch.setattr(HttpEngine, "updating_s", seconds)

    def end_later():
        asyncio.get_running_loop().call_later(1.0, process.terminate)

    if seconds < 20:
        assert watch(url, process, end_later) == -signal.SIGTERM
    else:
        with pytest.raises(launched.EngineFrozen, match=r"21 s, longer than weight_sync\.timeout_s = 20"):
            watch(url, process, end_later)


def test_a_server_that_ends_while_starting_names_the_cause(monkeypatch, tmp_path):
    dead = AsyncMock(**{"health.side_effect": EngineTimeout("no answer")})
    monkeypatch.setattr(launched, "build_engine", lambda config, url: dead)
    log = tmp_path / "engine-0.log"
    log.write_text("x\nValueError: No available memory\nRuntimeError: See root cause above.\n")
    settings = SimpleNamespace(engine=SimpleNamespace(start_timeout_s=5))
    ended = SimpleNamespace(poll=lambda: 1)
    with pytest.raises(
        launched.EngineStartError, match=r"\(exit code 1\); ValueError: No available.*engine-0.log, line 2"
    ):
        launched._wait_healthy(settings, "http://engine", ended, log)


DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"


def test_a_server_that_does_not_end_when_it_is_asked_to_is_killed(monkeypatch):
    monkeypatch.setattr(launched, "STOP_S", 0.2)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            launched._pass_on_signals(process)
            signal.raise_signal(signal.SIGTERM)
            assert process.wait(10) == -signal.SIGKILL
        finally:
            process.kill()
            for number, handler in handlers.items():
                signal.signal(number, handler)


@pytest.mark.parametrize(
    ("published", "serves", "expected"),
    [
        ("model", "merged", ("v3", 3)),
        ("adapter", "adapter", ("start", 0)),
        ("adapter", "merged", ("start", 0)),
        ("model", "adapter", ("start", 0)),
        ("delta", "merged", ("v2", 2)),
    ],
)
def test_an_engine_starts_with_a_whole_model_and_adapters_with_that_of_the_run(tmp_path, published, serves, expected):
    """Also where a resumed run publishes the other kind from now on (weight_sync.lora)."""
    path = tmp_path / "v3"
    path.mkdir()
    if published == "delta":  # the run then makes the engine load the delta
        write_base(path, "v2")
    (path / ("adapter_config.json" if published == "adapter" else "config.json")).write_text("{}")
    config = make_config(
        run={"dir": tmp_path}, model={"path": tmp_path / "start"}, data={"train": "t"}, weight_sync={"lora": serves}
    )
    run = RunDir(tmp_path)
    PublishedPolicy(3, str(path), 0.0).write(run.published)
    model, version = launched._policy_to_serve(config, run, 0)
    assert (model.name, version) == expected
