"""A publish confirms only engines that loaded it, in bounded time, when others die, freeze or are away.

tests/train/weight_sync tests the publisher on top of this: engines that refuse, and updates that take too long.
"""

import asyncio
import time

import numpy as np
import pytest

from dppo_megatron.rollout.engines.protocol import EngineError
from dppo_megatron.rollout.fleet.live_engines import Confirmation, LiveEngines
from tests.support.fakes.fleet import PROBE, A, B, FakeServer, World, policy_scores


def publish(world: World, version: int, *, meanwhile=None, loads: int | None = None):
    """Return the outcome of publishing `version` while `meanwhile()` runs; A `loads` another version."""

    async def load(engine):
        await engine.load_weights("/weights", loads if loads and engine.url == A else version)

    async def main():
        engines = LiveEngines(world.config, world.services, world.build)
        beside = asyncio.ensure_future(meanwhile()) if meanwhile else None
        try:
            async with asyncio.timeout(10):
                answering, silent = await engines.answering()
                outcomes = await engines.load_and_confirm(version, answering, load, np.array(PROBE, np.int32))
                failed = {url: outcome for url, outcome in outcomes.items() if isinstance(outcome, EngineError)}
                return [outcome for outcome in outcomes.values() if isinstance(outcome, Confirmation)], silent | failed
        finally:
            if beside:
                beside.cancel()
            await engines.close()

    return asyncio.run(main())


@pytest.mark.parametrize("broken", [{"up": False}, {"frozen": True}], ids=["dead", "frozen"])
def test_one_that_does_not_answer_is_left_out_in_little_time(world, broken):
    w = world(FakeServer(**broken), FakeServer())
    started = time.monotonic()
    confirmed, left_out = publish(w, 3)
    assert time.monotonic() - started < 2
    assert [(c.url, c.instance) for c in confirmed] == [(B, w.servers[B].instance)]
    assert confirmed[0].scores.tolist() == policy_scores(3)
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


def test_one_that_registered_elsewhere_is_found(world):
    w = world(FakeServer(up=False), FakeServer())
    w.registered = {"engine-0": B}
    confirmed, left_out = publish(w, 3)
    assert [c.url for c in confirmed] == [B]
    assert not left_out


def test_one_that_serves_another_version_after_its_load_is_not_confirmed(world):
    confirmed, left_out = publish(world(), 3, loads=2)
    assert [c.url for c in confirmed] == [B]
    assert len(left_out) == 1
