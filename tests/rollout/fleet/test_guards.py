"""Every request that reads weights passes each guard of the pool: no answer is of weights that are not verified."""

import asyncio
import json

import numpy as np
import pytest

from dppo_megatron.rollout.engines.protocol import GenerateRequest
from dppo_megatron.run_dir import RunDir
from tests.support.fakes.fleet import A, B, FakeServer, request, tokens, until

REQUESTS = {  # every request of the pool that reads weights
    "sample": lambda name: request(name),
    "score": lambda name: GenerateRequest(name, np.array([1, 2]), 1, (7,), 1.0, 4, topk=1, scored=True),
}


def from_policy(version: int, rollouts) -> bool:
    """Return whether the engine had exactly the weights of `version` when it answered."""
    if len(rollouts) == 1:
        return rollouts[0].rollout_logprob.tolist() == [-1 - version]
    expected = [np.random.default_rng([seed, version]).integers(0, 99, 4).tolist() for seed in (7, 8)]
    return tokens(rollouts) == expected


async def answers_later(w, server, name: str) -> None:
    """Wait until B runs a request, then change it so that its reply must not count."""
    await until(lambda: server.running > 0)
    server.weights = 2
    if name == "dies":
        server.up = False
    elif name == "restarts":
        server.restart(2, 3)
    elif name == "reports an older policy":
        server.claims = 2
    elif name == "loads a policy that excludes it":
        server.misloads, server.weights, server.claims = True, 4, 4
        await asyncio.sleep(0.05)
        w.publish(4, to=(A,))


EXCLUDED = {  # B never gets a request
    "dead": {"up": False},
    "frozen": {"frozen": True},
    "old weights that it keeps": {"weights": 2, "claims": 2, "ignores_loads": True},
    "old weights under the published version": {"weights": 2, "claims": 3, "ignores_loads": True},
    "other bits": {"weights": 3, "claims": 3, "misloads": True},
    "refuses the policy": {"weights": 2, "refuses": True},
}
LATER = ("dies", "restarts", "reports an older policy", "loads a policy that excludes it")


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("fault", EXCLUDED)
async def test_no_request_reaches_an_engine_that_is_not_verified(world, kind, fault):
    w = world(FakeServer(), FakeServer(**EXCLUDED[fault]), health_interval_s=0.01)
    w.publish(3, to=(A,))
    async with w.live() as sampler:
        for i in range(4):
            await asyncio.sleep(0.03)  # several health checks and verifications
            results = await asyncio.gather(*(sampler.generate(REQUESTS[kind](f"{i}.{j}")) for j in range(4)))
            assert all(from_policy(3, rollouts) for rollouts in results)

    assert w.servers[B].asked == []


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("fault", LATER)
async def test_no_reply_counts_of_weights_that_are_not_verified(world, kind, fault):
    w = world(FakeServer(), FakeServer(generate_s=0.2), health_interval_s=0.5)
    w.publish(3)
    async with w.live() as sampler:
        await sampler.generate(request())  # reads the published policy
        await until(lambda: sampler.take_metrics()["engine/serving"] == 2)
        calls = [asyncio.ensure_future(sampler.generate(REQUESTS[kind](str(i)))) for i in range(4)]
        await answers_later(w, w.servers[B], fault)
        results = await asyncio.gather(*calls)
        assert all(from_policy(3, rollouts) or from_policy(4, rollouts) for rollouts in results)

    assert w.servers[B].asked


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "file of an earlier version"])
async def test_the_pool_compares_the_fingerprints_of_the_published_policy(world, recorded):
    """A file without fingerprints is readable; the pool then compares only log-probs."""
    w = world(FakeServer(up=False), FakeServer(misloads=True))
    w.publish(3, to=())
    path = RunDir(w.config.run.dir).published
    fields = json.loads(path.read_text())
    assert fields.pop("fingerprint") == {"layer 0": 3}
    if not recorded:
        path.write_text(json.dumps(fields))
    async with w.live() as sampler:
        await until(lambda: w.servers[B].loads)
        await asyncio.sleep(0.1)
        assert sampler.take_metrics()["engine/serving"] == (0 if recorded else 1)
        described = w.pool._why_none("g")
        assert ("not admitted: has other weights than the trainer sent: layer 0" in described) == recorded
