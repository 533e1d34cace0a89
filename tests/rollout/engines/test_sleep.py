"""A sleeping engine of any kind samples nothing until it woke and loaded, is healthy, and accepts repeated calls. Only
GPUs show that it frees its memory."""

import asyncio

import numpy as np
import pytest

from dppo_megatron.rollout.engines.protocol import EngineError, EngineRefused
from dppo_megatron.rollout.fleet.engine_checks import check_health
from dppo_megatron.run.launch.evaluate import with_settings
from tests.rollout.engines.test_contract import TOLERANCE, some_steps
from tests.rollout.engines.test_contract_updates import PROBE
from tests.support.engines import group


def use_colocated(served, function):
    """Return the result of `function` on a client of a run with colocated engines."""
    return served.use(function, with_settings(served.config, engine={"placement": "colocated"}))


async def refuses_to_serve(engine) -> None:
    for call in (engine.generate(group("early", n=1)), engine.score(PROBE), engine.weights_fingerprint()):
        with pytest.raises(EngineError, match="put to sleep") as raised:
            await asyncio.wait_for(call, 20)
        assert not isinstance(raised.value, EngineRefused), "it would be refused again, and end the run"


def test_a_sleeper_serves_nothing_until_it_woke_and_loaded(served, load):
    async def nap(engine):
        running = asyncio.ensure_future(engine.generate(group("before", n=2, max_tokens=100)))
        await some_steps(engine, running)
        await engine.sleep()
        assert running.done() or (await asyncio.wait_for(running, 5))
        await refuses_to_serve(engine)
        await engine.wake()
        await refuses_to_serve(engine)
        await load(engine, "b", 1)
        return await running, await engine.generate(group("after", n=2)), await engine.score(PROBE)

    before, after, score = use_colocated(served, nap)
    assert all(len(r.token_ids) == 100 and (r.versions == 0).all() for r in before), "they end before it sleeps"
    assert all((r.versions == 1).all() for r in after)
    assert np.abs(score - served.reference("b").score(PROBE)).max() < TOLERANCE


def test_calls_may_be_repeated_and_a_sleeper_is_healthy_and_reports_the_version_that_it_served(served, load):
    """A run's orchestrator would load the published policy into one that lags."""

    async def twice(engine):
        await load(engine, "a", 3)
        await engine.wake()  # it is awake, and keeps serving
        (rollout,) = await engine.generate(group("awake", n=1))
        reported = []
        for call in (engine.sleep, engine.sleep, engine.wake, engine.wake, engine.sleep, engine.wake):
            await call()
            info = await check_health(engine, served.config)
            reported.append((info.version, info.updating_s))
        await refuses_to_serve(engine)
        await load(engine, "b", 4)
        return rollout, reported, await engine.info(), await engine.score(PROBE)

    rollout, reported, info, score = use_colocated(served, twice)
    assert (rollout.versions == 3).all()
    assert reported == [(3, None)] * 6
    assert info.version == 4
    assert np.abs(score - served.reference("b").score(PROBE)).max() < TOLERANCE
