"""An engine with a wrong loader never serves, whichever process restarts: the real publisher and pool, fake engines."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dppo_megatron.common.ranks import Ranks
from dppo_megatron.config import with_settings
from dppo_megatron.rollout.engines.protocol import GenerateRequest
from dppo_megatron.rollout.fleet.live_engines import LiveEngines
from dppo_megatron.train.weight_sync.publisher import Publisher
from dppo_megatron.train.weight_sync.transport import Transport
from tests.support.fakes.fleet import PROBE, A, B, FakeServer, World, policy_scores, request
from tests.support.fakes.orchestrator import sampling_config

STEPS = 3


class Loads(Transport):
    """Lets an engine load the version, of which a directory remains with shared storage."""

    def prepare(self, version: int) -> None:
        self.sent = {"layer 0": version}
        self._actor.version = version

    async def receive(self, engine, version: int) -> float:
        await engine.load_weights(Path("/weights"), version)
        return 0.0

    def directory(self, version: int) -> Path | None:
        return Path("/weights") if self._config.weight_sync.transport == "shared_storage" else None


class Engines:
    """Calls the engines in the pool's event loop, because fake servers are not locked against threads."""

    def __init__(self, world: World):
        self._live = LiveEngines(world.config, world.services, world.build)
        self.loop: asyncio.AbstractEventLoop | None = None

    def start(self, call, *arguments, **named):
        return asyncio.run_coroutine_threadsafe(call(self._live, *arguments, **named), self.loop)


def publisher(world: World, engines: Engines) -> Publisher:
    actor = SimpleNamespace(score=lambda tokens: np.array(policy_scores(actor.version), np.float32))
    ranks = Ranks(5.0)
    transport = Loads(world.config, actor, ranks)
    return Publisher(world.config, actor, engines, ranks, transport, np.array(PROBE, np.int32))


@pytest.mark.parametrize("restarted", ["nothing", "wrong engine", "right engine", "pool", "publisher", "all"])
@pytest.mark.parametrize("transport", ["shared_storage", "broadcast"])
@pytest.mark.parametrize("instance", ["named", ""], ids=["vllm", "sglang"])
async def test_no_sample_is_of_an_engine_with_a_wrong_loader(tmp_path, restarted, transport, instance):
    """Samples and scores are requested all the time, also while a policy is loaded but not published."""
    checks = {"health_interval_s": 0.02, "health_timeout_s": 0.2, "health_failures": 2, "unavailable_timeout_s": 5.0}
    config = with_settings(sampling_config(tmp_path / "run"), engine=checks, weight_sync={"transport": transport})
    config.run.dir.mkdir()
    right, wrong = FakeServer(instance=instance, load_s=0.02), FakeServer(instance=instance, misloads=True)
    world = World(config, {A: right, B: wrong})
    engines = Engines(world)
    trainer, results, asked = publisher(world, engines), [], []

    async def step(sampler, version: int) -> None:
        nonlocal trainer
        engines.loop = asyncio.get_running_loop()
        if version == 1:
            await asyncio.to_thread(trainer.publish, 0)

        async def ask(i: int, scored: bool) -> None:
            while True:
                name = f"{version}-{i}-{len(asked)}"
                asked.append(name)
                score = GenerateRequest(name, np.array([1, 2]), 1, (7,), 1.0, 4, scored=True)
                results.append(await sampler.generate(score if scored else request(name)))
                await asyncio.sleep(0.002)

        clients = [asyncio.ensure_future(ask(i, i % 2 == 0)) for i in range(4)]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(trainer.publish, version)
        await asyncio.sleep(0.05)
        if restarted in ("publisher", "all"):
            trainer = publisher(world, engines)
        if restarted in ("wrong engine", "all"):
            wrong.restart(version, version)
        if restarted in ("right engine", "all"):
            right.up = False
            await asyncio.sleep(0.1)
            right.restart(0, version)  # the start model, under any version
        if transport == "broadcast" and (restarted == "all" or await asyncio.to_thread(trainer.engines_lag)):
            await asyncio.to_thread(trainer.publish, version)
        before = len(results)
        async with asyncio.timeout(5):
            while len(results) < before + 8:
                await asyncio.sleep(0.01)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    pools = [[version] for version in range(1, STEPS + 1)] if restarted in ("pool", "all") else [range(1, STEPS + 1)]
    for versions in pools:
        async with world.live() as sampler:
            for version in versions:
                await step(sampler, version)
    seen = set()
    for rollouts in results:
        version = int(rollouts[0].versions[0])
        seen.add(version)
        if len(rollouts) == 1:
            assert rollouts[0].rollout_logprob.tolist() == [-1 - version]
        for seed, rollout in zip((7, 8), rollouts if len(rollouts) > 1 else (), strict=False):
            assert rollout.token_ids.tolist() == np.random.default_rng([seed, version]).integers(0, 99, 4).tolist()
    assert seen == set(range(STEPS + 1))
    assert wrong.asked == []
