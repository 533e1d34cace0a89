"""The pool on fake servers: it routes requests, sends those of dead engines again, and admits verified engines only."""

import asyncio
import time
from collections import Counter

import numpy as np
import pytest

from dppo_megatron.rollout.engines.protocol import EngineIncompatible, EngineUnavailable
from dppo_megatron.rollout.fleet.monitored_engine import MonitoredEngine
from dppo_megatron.rollout.fleet.pool import NoEngineServes, _work
from tests.support.fakes.fleet import A, B, FakeEngine, FakeServer, many, request, tokens, until


async def test_requests_go_to_the_least_loaded_engine(world):
    w = world(FakeServer(generate_s=0.05), FakeServer(generate_s=0.05))
    async with w.live() as sampler:
        await until(lambda: sampler.take_metrics()["engine/serving"] == 2)
        await many(sampler, 10)

    assert [len(server.asked) for server in w.servers.values()] == [5, 5]
    assert w.servers[A].loads == w.servers[B].loads == []  # confirmed by the publisher: not loaded again


def test_every_share_of_the_work_of_engines_has_its_own_denominator():
    drafts = {"drafted": 8, "accepted": 6, "draft_steps": 3, "sampled_tokens": 20}
    engines = [Counter(cached_tokens=9, prompt_tokens=10, **drafts), Counter(cached_tokens=5, prompt_tokens=30)]
    assert _work(engines) == {
        "engine/prefix_hits": 14 / 40,
        "engine/prefix_hits_min": 5 / 30,
        "drafts/accepted_share": 6 / 8,
        "drafts/accepted_per_step": 6 / 3,
        "drafts/saved_share": 6 / 20,
    }
    assert _work([Counter()]) == {}


@pytest.mark.parametrize("end", ["dies", "freezes", "vanishes"])
async def test_requests_of_a_lost_engine_are_sent_unchanged_to_another(world, end):
    w = world(FakeServer(generate_s=30), FakeServer(up=False))
    async with w.live() as sampler:
        calls = asyncio.ensure_future(many(sampler, 4))
        await until(lambda: w.servers[A].running == 4)
        w.servers[B].up = True
        lost = time.monotonic()
        if end == "dies":
            w.servers[A].up = False
        if end == "freezes":
            w.servers[A].frozen = True
        if end == "vanishes":
            del w.registered["engine-0"]
        results = await calls
        assert time.monotonic() - lost < 3  # 2 health checks of 0.1 s and a reload, on a busy machine
        assert all(tokens(result) == tokens(results[0]) for result in results)
        metrics = sampler.take_metrics()
        assert metrics["engine/retried_requests"] == 4
        await asyncio.sleep(0.3)  # a server that left the registry answers its health checks
        assert metrics["engine/deaths"] + sampler.take_metrics()["engine/deaths"] == 1

    sent, again = (sorted(server.asked, key=lambda r: r.request_id) for server in w.servers.values())
    assert [r.seeds for r in again] == [r.seeds for r in sent]
    assert [r.request_id for r in again] == [f"g{i}~1" for i in range(4)]


async def test_a_suspect_keeps_its_requests_and_gets_no_new_ones(world):
    w = world(FakeServer(generate_s=0.6), FakeServer(), health_failures=1000)
    async with w.live() as sampler:
        await until(lambda: sampler.take_metrics()["engine/serving"] == 2)
        first = asyncio.ensure_future(many(sampler, 2))
        await until(lambda: w.servers[A].running == 1)
        w.servers[A].frozen = True
        await until(lambda: sampler.take_metrics()["engine/serving"] == 1)
        await many(sampler, 5)
        assert len(w.servers[A].asked) == 1
        w.servers[A].frozen = False
        await first
        assert sampler.take_metrics()["engine/retried_requests"] == 0


@pytest.mark.parametrize(("weights", "claims"), [(0, 0), (2, 2), (2, 3)], ids=["start", "old", "old, claims current"])
async def test_a_restarted_engine_is_loaded_and_scored_before_it_gets_a_request(world, weights, claims):
    w = world(FakeServer())
    w.publish(3)
    async with w.live() as sampler:
        await sampler.generate(request())
        w.servers[A].restart(weights, claims)  # between two health checks, at the same address
        (rollout, _) = await sampler.generate(request("after"))
        assert w.servers[A].loads == [3]
        expected = np.random.default_rng([7, 3]).integers(0, 99, 4)
        assert rollout.token_ids.tolist() == expected.tolist()
        assert sampler.take_metrics()["engine/caught_up"] == 1


async def test_one_that_comes_back_at_another_address_is_found_there(world):
    w = world(FakeServer(), FakeServer(weights=1, claims=3))
    w.registered = {"engine-0": A}
    w.publish(3, to=(A,))
    async with w.live() as sampler:
        await sampler.generate(request())
        w.servers[A].up = False
        w.registered = {"engine-0": B}
        await sampler.generate(request("after"))
        assert w.servers[B].loads == [3]
        assert sampler.take_metrics()["engine/restarts"] == 1


async def test_an_engine_that_falsely_claims_a_version_is_never_admitted(world):
    w = world(FakeServer(), FakeServer(weights=1, claims=3, ignores_loads=True), health_interval_s=0.01)
    w.publish(3, to=(A,))
    async with w.live() as sampler:
        await until(lambda: len(w.servers[B].loads) >= 3)  # tried again, each time after a longer wait
        await many(sampler, 10)
        assert w.servers[B].asked == []
        assert sampler.take_metrics()["engine/serving"] == 1


async def test_a_published_policy_is_waited_for_before_the_next_request(world):
    """An engine that the publisher left out is behind: it must be caught up, however new the news are."""
    w = world()
    async with w.live() as sampler:
        for version in range(1, 6):
            w.publish(version, to=(A,))
            results = await many(sampler, 6)
            assert {int(v) for result in results for r in result for v in r.versions} == {version}

    assert set(w.servers[B].loads) <= {1, 2, 3, 4, 5}


async def test_the_pool_does_not_undo_a_version_that_the_trainer_is_publishing(world):
    """The next policy is in every engine, confirmed by none of them so far: the pool must not load the old one."""
    w = world()
    async with w.live() as sampler:
        await until(lambda: sampler.take_metrics()["engine/serving"] == 2)
        for version in range(1, 4):
            for server in w.servers.values():
                server.weights = server.claims = version
            await asyncio.sleep(0.1)  # several health checks
            early = asyncio.ensure_future(many(sampler, 4))
            await asyncio.sleep(0.1)
            assert not early.done()  # their tokens are of a policy that the publisher has not verified yet
            w.publish(version)
            await early
            await many(sampler, 4)
        assert w.servers[A].loads == w.servers[B].loads == []
        assert {len(server.asked) for server in w.servers.values()} == {12}  # neither was ever out


async def test_without_a_trainer_the_weights_of_another_run_in_an_engine_are_replaced(world):
    w = world(FakeServer())
    w.publish(0, to=())
    w.servers[A].weights = w.servers[A].claims = 4
    async with w.live(trainer=False) as sampler:
        (rollout, _) = await sampler.generate(request())
        assert rollout.versions.tolist() == [0] * 4

    assert w.servers[A].loads == [0]


async def test_one_loaded_over_by_an_older_policy_is_caught_up(world):
    """Confirmed for policy 2, but a load of policy 1 that was still on its way came after it."""
    w = world(FakeServer())
    async with w.live() as sampler:
        await sampler.generate(request())
        w.publish(2)
        w.servers[A].weights = w.servers[A].claims = 1
        (rollout, _) = await sampler.generate(request("after"))
        assert rollout.versions.tolist() == [2] * 4


async def test_tokens_of_an_older_policy_than_the_engine_was_admitted_with_are_refused(world):
    w = world()
    w.publish(3)
    async with w.live() as sampler:
        await until(lambda: sampler.take_metrics()["engine/serving"] == 2)
        w.servers[A].claims = 2  # only its samples show it: no health check comes in between
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MonitoredEngine, "_check_health", lambda self: asyncio.sleep(60))
            results = await many(sampler, 2)
        assert {int(v) for result in results for r in result for v in r.versions} == {3}


async def test_without_an_engine_a_request_waits_and_its_error_names_every_engine(world):
    w = world(FakeServer(up=False), FakeServer(weights=1, refuses=True), unavailable_timeout_s=0.5)
    w.publish(3, to=())
    async with w.live() as sampler:
        with pytest.raises(NoEngineServes) as error:
            await sampler.generate(request())
        message = str(error.value)
        assert "waited 0.5 s (engine.unavailable_timeout_s)" in message
        assert "version 3" in message
        assert "engine-0 at http://a: starting" in message
        assert "engine-1 at http://b: dead" in message
        assert "other shapes" in message


async def test_the_only_engine_may_come_back(world):
    w = world(FakeServer())
    async with w.live() as sampler:
        await sampler.generate(request())
        w.servers[A].up = False
        call = asyncio.ensure_future(sampler.generate(request("after")))
        await asyncio.sleep(0.2)
        assert not call.done()
        w.servers[A].restart(0, 0)
        await call


async def test_broadcast_weights_that_an_engine_kept_while_it_froze_are_verified_without_loading(world):
    w = world(FakeServer())
    w.publish(3, path=None)
    async with w.live() as sampler:
        await sampler.generate(request())
        for kept in (True, False):
            w.servers[A].frozen = True
            await until(lambda: sampler.take_metrics()["engine/deaths"] == 1)
            w.servers[A].weights = 3 if kept else 2
            w.servers[A].frozen = False
            call = asyncio.ensure_future(sampler.generate(request(f"kept {kept}")))
            done, _ = await asyncio.wait((call,), timeout=2 if kept else 0.3)
            assert bool(done) == kept
        call.cancel()

    assert w.servers[A].loads == []


async def test_broadcast_weights_are_not_expected_of_a_life_that_never_had_them(world):
    w = world(FakeServer())
    w.publish(3, path=None)
    async with w.live() as sampler:
        await sampler.generate(request())
        w.servers[A].restart(3, 3)
        call = asyncio.ensure_future(sampler.generate(request("after")))
        await asyncio.sleep(0.3)
        assert not call.done()
        w.publish(3, path=None)  # once more, by the trainer
        await call

    assert w.servers[A].loads == []


async def test_an_engine_that_is_closed_as_it_is_notified_ends(world):
    w = world(FakeServer(), health_interval_s=5.0)
    async with w.live() as sampler:
        await sampler.generate(request())
        (engine,) = w.pool._engines.values()
        await asyncio.sleep(0.05)  # between two health checks
        engine._wake.set()
        async with asyncio.timeout(1):
            await engine.close()


async def test_a_request_that_is_cancelled_as_it_is_notified_ends(world):
    w = world(FakeServer(up=False))
    async with w.live() as sampler:
        call = asyncio.ensure_future(sampler.generate(request()))
        await asyncio.sleep(0.05)
        w.pool._on_change()
        call.cancel()
        await asyncio.wait((call,), timeout=1)
        assert call.cancelled()


async def test_one_with_settings_that_do_not_suit_is_not_admitted(world):
    w = world(FakeServer(), FakeServer())
    w.publish(1, to=(A,))

    async def check(engine):
        if engine.url == B:
            raise EngineIncompatible("vocabulary of 10")

    async with w.live(check=check) as sampler:
        await asyncio.sleep(0.2)
        await many(sampler, 4)
        assert w.servers[B].loads == w.servers[B].asked == []


async def sample_while_it_restarts(w, sampler):
    """The engine restarts during its first load."""
    call = asyncio.ensure_future(sampler.generate(request()))
    await until(lambda: len(w.servers[A].loads) == 1)
    w.servers[A].restart(2, 3)
    await call


async def test_an_engine_that_dies_while_it_is_verified_is_verified_again(world):
    w = world(FakeServer(load_s=0.3))
    w.publish(3, to=())
    async with w.live() as sampler:
        await sample_while_it_restarts(w, sampler)
        assert w.servers[A].loads == [3, 3]


async def test_a_verification_ends_with_the_instance_that_it_is_of(world):
    """The load in the first instance would fail while the second one loads."""
    w, ended = world(FakeServer()), asyncio.Event()

    class Slow(FakeEngine):
        async def load_weights(self, path, version, mode="keep"):
            server = w.servers[A]
            server.loads.append(version)
            if len(server.loads) == 1:
                try:
                    await until(lambda: len(server.loads) > 1)
                finally:
                    ended.set()
                raise EngineUnavailable("connection reset")
            await ended.wait()
            await asyncio.sleep(0.05)
            server.weights = server.claims = version

    w.build = lambda config, url: Slow(url, w.servers[url])
    w.publish(3, to=())
    async with w.live() as sampler:
        await sample_while_it_restarts(w, sampler)
        metrics = sampler.take_metrics()
        assert (metrics["engine/restarts"], metrics["engine/deaths"]) == (1, 0)
