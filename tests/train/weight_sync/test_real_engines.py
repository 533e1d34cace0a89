"""Broadcasts and directories into real vLLM servers: A -> B -> A by log-probs, and an engine killed on the way."""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest

from dppo_megatron.config import Config
from dppo_megatron.rollout.engines.kinds import KINDS
from dppo_megatron.run.launch.evaluate import with_settings
from tests.support.engines import Reference, engine_config, make_model, running_server
from tests.support.faults import Proxy
from tests.support.ranks import Ranks
from tests.train.weight_sync.trainer_process import PROBE, WAIT, publish_all

pytestmark = pytest.mark.engines
TOLERANCE = 1e-4
OUT = "records"
FORGETFUL = Path(__file__).parents[2] / "support" / "forgetful_sglang"


def publish(
    directory: Path,
    model: Path,
    urls: list[str],
    policies: list[Path],
    *,
    ranks=1,
    parallel=None,
    engine=None,
    dtype="fp32",
    **weight_sync,
) -> list[dict]:
    """Publish the policies from new trainer ranks; return their records. A file `OUT.<version>` begins each publish."""
    tree = {
        "run": {"dir": str(directory / "run")},
        "model": {"path": str(model), "dtype": dtype},
        "parallel": {"world_size": ranks, "timeout_s": 60, **(parallel or {})},
        "train": {"steps": 1},
        "optimizer": {"lr": 1e-6},
        "data": {"train": "unused"},
        "engine": {
            **{"urls": urls, "dtype": dtype, "max_model_len": 512, "unavailable_timeout_s": 10},
            **{"secret_file": str(model.parent / "secret"), **(engine or {})},
        },
        "weight_sync": {"timeout_s": 20, **weight_sync},
    }
    directory.mkdir(parents=True, exist_ok=True)
    with Ranks(ranks) as trainer:
        return trainer.run(publish_all, tree=tree, out=directory / OUT, policies=policies)[0]


def listening(url: str) -> psutil.Process:
    """The server behind `url`."""
    port = int(url.rpartition(":")[2])
    (pid,) = {c.pid for c in psutil.net_connections() if c.status == "LISTEN" and c.laddr.port == port}
    return psutil.Process(pid)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("dense")
    return make_model(root / "a", seed=1), make_model(root / "b", seed=2)


@pytest.fixture(scope="module")
def two_servers(dense, tmp_path_factory):
    yield from started_together(engine_config(dense[0]), tmp_path_factory.mktemp("logs"))


def started_together(config: Config, logs: Path) -> Iterator[list[str]]:
    """The URLs of two servers, which take long to start."""
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        begun = [threads.submit(stack.enter_context, running_server(config, logs / n, version=0)) for n in "01"]
        yield [server.result() for server in begun]


@pytest.mark.parametrize(
    ("transport", "ranks", "parallel"),
    [
        ("shared_storage", 1, {}),
        ("broadcast", 1, {}),
        pytest.param("broadcast", 2, {"tensor": 2}, marks=pytest.mark.smoke),
        ("broadcast", 2, {"pipeline": 2}),
    ],
)
def test_there_and_back_on_two_engines(two_servers, dense, tmp_path, transport, ranks, parallel):
    a, b = dense
    settings = {"ranks": ranks, "parallel": parallel, "transport": transport, "bucket_bytes": 50_000}
    check_scores(publish(tmp_path, a, two_servers, [a, b, a], **settings), (a, b, a), two_servers, TOLERANCE)


@pytest.fixture
def forgetful_sglang(dense, tmp_path):
    """One server, which fills its weights and cache with NaN when it sleeps."""
    config = engine_config(dense[0], kind="sglang")
    needs_sglang(config)
    path = os.pathsep.join((KINDS["sglang"].environment(config, 0)["PYTHONPATH"], str(FORGETFUL)))
    config = with_settings(config, engine={"env": config.engine.env | {"PYTHONPATH": path}})
    with running_server(config, tmp_path / "log", version=0) as url:
        yield [url]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_colocated_engines_sleep_while_the_trainer_trains(request, dense, tmp_path, kind):
    """Engines serve nothing in between, and an SGLang server uses no memory from before it slept. Only GPUs free the
    memory."""
    servers = request.getfixturevalue({"vllm": "two_servers", "sglang": "forgetful_sglang"}[kind])
    a, b = dense
    settings = {"placement": "colocated", "kind": kind}
    records = publish(tmp_path, a, servers, [a, b, a], engine=settings, fingerprint=True)
    check_scores(records, (a, b, a), servers, TOLERANCE)


def needs_sglang(config: Config) -> None:
    if not KINDS["sglang"].python(config).with_name("sglang").exists():
        pytest.skip("needs SGLang's environment (make sglang)")


def check_scores(records: list[dict], policies: Sequence[Path], urls: Sequence[str], tolerance: float) -> None:
    """Every engine scores as the policy that was published."""
    for record, policy in zip(records, policies, strict=True):
        assert record["engines"] == len(urls)
        expected = Reference(policy).score(PROBE)
        for url in urls:
            assert np.abs(np.array(record["scores"][url]) - expected).max() < tolerance


class FreezesAt:
    """A proxy hook that suspends `family` just after a request to the route `phases[number]` in publish `number`, until
    the next publish begins."""

    def __init__(self, family: list[psutil.Process], out: Path, phases: dict[int, str]):
        self._family, self._out, self._phases = family, out, phases
        self.frozen: list[str] = []

    async def __call__(self, path, body, forward):
        number = max((int(file.suffix[1:]) for file in self._out.parent.glob(f"{self._out.name}.*")), default=0)
        if self._phases.get(number) != path:
            return await forward()
        del self._phases[number]
        reply = asyncio.ensure_future(forward())
        await asyncio.sleep(0.02)
        self.frozen.append(path)
        for process in self._family:
            process.suspend()
        while not Path(f"{self._out}.{number + 1}").exists():
            await asyncio.sleep(0.01)
        self.thaw()
        return await reply

    def thaw(self) -> None:
        for process in self._family:
            process.resume()


def publish_frozen(
    servers: Sequence[str], directory: Path, model: Path, routes: Sequence[str], policies: list[Path], **settings
) -> list[dict]:
    """Records of publishes to two servers. In every second one, the second server freezes at one of `routes`."""
    server, out = listening(servers[1]), directory / OUT
    frozen = {2 * place + 1: route for place, route in enumerate(routes)}
    hook = FreezesAt([server, *server.children(recursive=True)], out, frozen)
    checks = {"health_interval_s": 0.5, "health_timeout_s": 2, "health_failures": 3}
    settings["engine"] = checks | settings.get("engine", {})
    try:
        with Proxy(servers[1], hook) as proxy:
            records = publish(directory, model, [servers[0], proxy.url], policies, **settings)
    finally:
        hook.thaw()
    assert hook.frozen == list(routes)
    return records


@pytest.mark.parametrize(
    ("transport", "phases"),
    [
        ({"transport": "shared_storage"}, ("load_weights", "score")),
        ({"transport": "broadcast", "bucket_bytes": 4096}, ("join_weight_group", "receive_weights", "fingerprint")),
    ],
    ids=["shared_storage", "broadcast"],
)
def test_an_engine_frozen_in_any_phase_is_left_out(two_servers, dense, tmp_path, transport, phases):
    """The other one continues with the new policy, and so do the trainer's ranks. The next publish has both again, or
    nothing would freeze in it. After an update both transports make the same two checks: each has one of them."""
    a, b = dense
    policies = [a, WAIT, b, WAIT] * (len(phases) // 2) + [a] * (len(phases) % 2)
    settings = {"ranks": 2, "parallel": {"tensor": 2, "timeout_s": 10}, "timeout_s": 10, **transport}
    routes = [f"/dppo/{phase}" for phase in phases]
    records = publish_frozen(two_servers, tmp_path, a, routes, policies, **settings)
    check_scores(records, ((a, b) * 2)[: len(phases)], two_servers[:1], TOLERANCE)


def test_an_engine_killed_during_an_update_is_named_within_the_time_out(two_servers, dense, tmp_path):
    """No engine is left to serve the policy, so the publish fails on time. It ends a server, so it is the last test."""
    a, b = dense
    url, settings = two_servers[1], {"transport": "broadcast", "bucket_bytes": 1024, "timeout_s": 10}
    with ThreadPoolExecutor(1) as thread:
        publishing = thread.submit(publish, tmp_path, a, [url], [a, b], **settings)
        while not (tmp_path / f"{OUT}.2").exists() and not publishing.done():
            time.sleep(0.001)
        listening(url).kill()
        first, second = publishing.result()
    assert first["engines"] == 1
    assert url in second["error"]
    assert second["seconds"] < 3 * 10
