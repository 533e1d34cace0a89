"""A publish confirms only engines that loaded it, in bounded time, when others die, freeze, refuse or are away.

tests/weight_sync tests the publisher on top of this.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from dppo_megatron.engines.protocol import EngineError, EngineRefused
from dppo_megatron.fleet.live_engines import Confirmation, LiveEngines
from tests.support.fakes.fleet import PROBE, A, B, FakeServer, World, policy_scores


def publish(world: World, version: int, *, meanwhile=None, load=None):
    """Return the outcome of publishing `version` while `meanwhile()` runs."""

    async def load_weights(engine):
        await engine.load_weights("/weights", version)

    async def main():
        engines = LiveEngines(world.config, world.services, world.build)
        beside = asyncio.ensure_future(meanwhile()) if meanwhile else None
        try:
            async with asyncio.timeout(10):
                answering, silent = await engines.answering()
                outcomes = await engines.load_and_confirm(
                    version, answering, load or load_weights, np.array(PROBE, np.int32)
                )
                failed = {url: outcome for url, outcome in outcomes.items() if isinstance(outcome, EngineError)}
                confirmed = [outcome for outcome in outcomes.values() if isinstance(outcome, Confirmation)]
                return confirmed, silent | failed
        finally:
            if beside:
                beside.cancel()
            await engines.close()

    return asyncio.run(main())


def test_every_engine_that_answers_is_confirmed(world):
    w = world(FakeServer(), FakeServer())
    confirmed, left_out = publish(w, 3)
    assert {c.url: c.instance for c in confirmed} == {A: w.servers[A].instance, B: w.servers[B].instance}
    assert all(c.scores.tolist() == policy_scores(3) for c in confirmed)
    assert not left_out


@pytest.mark.parametrize("broken", [{"up": False}, {"frozen": True}], ids=["dead", "frozen"])
def test_one_that_does_not_answer_is_left_out_in_little_time(world, broken):
    w = world(FakeServer(**broken), FakeServer())
    started = time.monotonic()
    confirmed, left_out = publish(w, 3)
    assert time.monotonic() - started < 2
    assert [c.url for c in confirmed] == [B]
    assert len(left_out) == 1


@pytest.mark.parametrize("end", ["dies", "freezes", "is restarted"])
def test_one_that_is_lost_while_it_loads_is_left_out(world, end):
    w = world(FakeServer(load_s=30), FakeServer())

    async def meanwhile():
        while not w.servers[A].loads:
            await asyncio.sleep(0.001)
        if end == "dies":
            w.servers[A].up = False
        if end == "freezes":
            w.servers[A].frozen = True
        if end == "is restarted":
            w.servers[A].restart(0, 3)

    started = time.monotonic()
    confirmed, left_out = publish(w, 3, meanwhile=meanwhile)
    assert time.monotonic() - started < 2
    assert [c.url for c in confirmed] == [B]
    assert len(left_out) == 1


def test_a_load_may_take_long_but_not_longer_than_an_update(world):
    w = world(FakeServer(load_s=0.8), FakeServer(load_s=30), update_s=1.2)
    started = time.monotonic()
    confirmed, left_out = publish(w, 3)
    assert time.monotonic() - started < 4
    assert [c.url for c in confirmed] == [A], "0.8 s are many times two failed health checks"
    assert "longer than weight_sync.timeout_s = 1.2" in str(left_out[B])


def test_one_that_registered_elsewhere_is_found(world):
    w = world(FakeServer(up=False), FakeServer())
    w.registered = {"engine-0": B}
    confirmed, left_out = publish(w, 3)
    assert [c.url for c in confirmed] == [B]
    assert not left_out


def test_weights_that_an_engine_refuses_are_told_from_failures(world):
    w = world(FakeServer(refuses=True), FakeServer())
    confirmed, left_out = publish(w, 3)
    assert [c.url for c in confirmed] == [B]
    assert isinstance(left_out[A], EngineRefused)


def test_one_that_serves_another_version_after_its_load_is_not_confirmed(world):
    w = world(FakeServer(), FakeServer())

    async def load(engine):
        await engine.load_weights("/weights", 2 if engine.url == A else 3)

    confirmed, left_out = publish(w, 3, load=load)
    assert [c.url for c in confirmed] == [B]
    assert len(left_out) == 1
