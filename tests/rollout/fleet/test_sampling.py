"""Requests go on when samples are interrupted, invalid or late: same seeds, joined token for token, within a budget."""

import asyncio

import numpy as np
import pytest

from dppo_megatron.rollout.engines.protocol import (
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    GenerateRequest,
    InvalidSample,
)
from dppo_megatron.rollout.fleet.pool import FixedEngines
from dppo_megatron.rollout.fleet.sampling import Sampler
from dppo_megatron.types import Rollout
from tests.support.fakes.fleet import A, FakeEngine, FakeServer, many, request, tokens, until

PROMPT = np.array([7, 8, 9], np.int32)


class InterruptingEngine:
    """Token i of a response is 100 + i; each call ends after `pieces[k]` tokens, k counting calls, by policy k."""

    def __init__(self, pieces: list[int], last: str = "stop"):
        self.pieces, self.last = pieces, last
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        call = len(self.requests)
        self.requests.append(request)
        done = len(request.token_ids) - len(PROMPT)
        size = self.pieces[min(call, len(self.pieces) - 1)]
        ends = call >= len(self.pieces) - 1
        tokens = np.arange(100 + done, 100 + done + size, dtype=np.int32)
        experts = np.full((len(request.token_ids) + size - 1, 2, 1), call, np.uint8)
        rollout = Rollout(
            tokens,
            -tokens.astype(np.float32),
            np.full(size, call, np.int32),
            self.last if ends else "abort",
            np.stack([tokens, tokens + 1], 1),
            np.stack([-tokens, -tokens - 1], 1).astype(np.float32),
            experts,
            sampling_mask_ids=np.stack([tokens, tokens + 7], 1).ravel(),
            sampling_mask_counts=np.full(size, 2, np.int32),
        )
        return (rollout,) * request.n


def sample(engine: InterruptingEngine, n: int = 1, max_tokens: int = 12):
    """The samples, and how often one was continued."""
    sampler = Sampler(FixedEngines([engine]))
    request = GenerateRequest("g", PROMPT, n, tuple(range(50, 50 + n)), 0.8, max_tokens, (99,), topk=2)
    return asyncio.run(sampler.generate(request)), sampler.take_metrics()["rollout/continued_samples"]


def test_pieces_join_with_their_own_log_probs_versions_and_lists():
    engine = InterruptingEngine([3, 0, 4])
    (rollout,), counted = sample(engine)
    tokens = np.arange(100, 107)
    np.testing.assert_array_equal(rollout.token_ids, tokens)
    np.testing.assert_array_equal(rollout.rollout_logprob, -tokens)
    np.testing.assert_array_equal(rollout.versions, [0, 0, 0, 2, 2, 2, 2])
    np.testing.assert_array_equal(rollout.topk_ids, np.stack([tokens, tokens + 1], 1))
    np.testing.assert_array_equal(rollout.sampling_mask_ids.reshape(7, 2), np.stack([tokens, tokens + 7], 1))
    assert rollout.sampling_mask_counts.tolist() == [2] * 7
    assert rollout.finish_reason == "stop"
    # Call 0 read the prompt and all of its own tokens but the last, call 2 everything after those.
    assert rollout.routed_experts[:, 0, 0].tolist() == [0] * 5 + [2] * 4
    assert len(rollout.routed_experts) == 3 + 7 - 1
    assert counted == 2


def test_a_continuation_requests_the_remaining_tokens_with_its_own_seeds():
    engine = InterruptingEngine([3, 2, 1])
    sample(engine, max_tokens=12)
    _, second, third = engine.requests
    assert [len(r.token_ids) for r in engine.requests] == [3, 6, 8]
    assert [r.max_tokens for r in engine.requests] == [12, 9, 7]
    assert len({r.seeds for r in engine.requests}) == len({r.request_id for r in engine.requests}) == 3
    assert (second.n, second.temperature, second.stop_token_ids, second.topk) == (1, 0.8, (99,), 2)
    again = InterruptingEngine([3, 2, 1])
    sample(again)
    assert third.seeds == again.requests[2].seeds


def test_only_interrupted_samples_are_continued():
    class Mixed(InterruptingEngine):
        async def generate(self, request):
            rollouts = await super().generate(request)
            if request.n == 1:
                return rollouts
            whole = Rollout(rollouts[0].token_ids, rollouts[0].rollout_logprob, rollouts[0].versions, "length")
            return (whole, *rollouts[1:])

    engine = Mixed([3, 2])
    rollouts, counted = sample(engine, n=3)
    assert [len(r.token_ids) for r in rollouts] == [3, 5, 5]
    assert counted == 2
    assert len({r.seeds for r in engine.requests[1:]}) == 2, "samples interrupted at the same place must not become one"


def test_interrupted_at_the_very_end_is_the_length_limit():
    (rollout,), _ = sample(InterruptingEngine([12, 1]), max_tokens=12)
    assert (len(rollout.token_ids), rollout.finish_reason) == (12, "length")


async def test_invalid_samples_are_asked_of_another_engine(world):
    w = world(FakeServer(corrupts=True), FakeServer())
    async with w.live() as sampler:
        await until(lambda: sampler.take_metrics()["engine/serving"] == 2)
        results = await many(sampler, 8)
        assert all(tokens(result) == tokens(results[0]) for result in results)
        metrics = sampler.take_metrics()
        assert metrics["rollout/invalid_samples"] == metrics["engine/retried_requests"] > 0
        assert metrics["engine/deaths"] >= 1  # an engine with invalid samples again and again is no longer asked


async def test_samples_that_are_invalid_from_every_engine_are_an_error(world):
    w = world(FakeServer(corrupts=True), FakeServer(corrupts=True))
    async with w.live() as sampler:
        await until(lambda: sampler.take_metrics()["engine/serving"] == 2)
        with pytest.raises(InvalidSample, match="NaN"):
            await sampler.generate(request())
        assert [len(server.asked) for server in w.servers.values()] == [1, 1]


async def test_requests_that_take_too_long_are_no_failures_while_health_checks_pass(world):
    class Impatient(FakeEngine):
        async def generate(self, request):
            try:
                async with asyncio.timeout(0.05):
                    return await super().generate(request)
            except TimeoutError:
                raise EngineTimeout(f"{request.request_id}: no answer") from None

    w = world(FakeServer(generate_s=30))
    w.build = lambda config, url: Impatient(url, w.servers[url])
    async with w.live() as sampler:
        calls = asyncio.ensure_future(many(sampler, 3))
        await until(lambda: len(w.servers[A].asked) >= 6)
        w.servers[A].generate_s = 0.0
        await calls
        metrics = sampler.take_metrics()
        assert (metrics["engine/deaths"], metrics["engine/retried_requests"] >= 3) == (0, True)


async def test_a_request_that_ends_every_engine_is_given_up(world):
    w = world(FakeServer())
    async with w.live() as sampler:

        async def dies_of_it():
            while True:
                if w.servers[A].running:
                    w.servers[A].restart(0, 0)
                await asyncio.sleep(0.001)

        w.servers[A].generate_s = 30
        killer = asyncio.ensure_future(dies_of_it())
        with pytest.raises(EngineError):
            await sampler.generate(request())
        killer.cancel()
        assert len(w.servers[A].asked) == 8


async def test_fixed_engines_get_a_request_once_each():
    gone, working = FakeServer(up=False), InterruptingEngine([2])
    sampler = Sampler(FixedEngines([FakeEngine(A, gone), working]))
    await sampler.generate(request())
    assert gone.asked[0].seeds == working.requests[0].seeds
    assert sampler.take_metrics()["engine/retried_requests"] == 1

    gone.asked.clear()
    with pytest.raises(EngineUnavailable, match="connection refused"):
        await Sampler(FixedEngines([FakeEngine(A, gone)])).generate(request())
    assert len(gone.asked) == 1
