"""Publishing from real trainer ranks to fake engines that die, freeze, disagree or fail."""

import asyncio
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from dppo_megatron.rollout.engines.protocol import EngineError, EngineRefused, EngineTimeout
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.weight_sync import publisher
from tests.support.actor_ranks import Rank, on_ranks, slow
from tests.support.fakes.engine import SCORES, FakeEngine
from tests.train.weight_sync.trainer_ranks import TIMEOUT_S, error_of, trainer

LONG_TIMEOUT_S = 30.0
FIRST = "http://127.0.0.1:90"
FREEZES: dict[str, list[str | int]] = {
    "broadcast": ["join", "receive", 3, "loaded", "check", "held"],
    "shared_storage": ["receive", "loaded", "check", "held"],
}
FROZEN_OFTEN = {3}  # within a bucket of a broadcast
CHECKS = {"health_interval_s": 0.1, "health_timeout_s": 0.2, "health_failures": 2}


@pytest.mark.parametrize("place", ["join", "receive", pytest.param(3, id="bucket")])
@on_ranks(2)
def test_an_engine_that_dies_is_left_out_and_taken_in_again(rank: Rank, place: str | int):
    """The second engine dies at `place` of the second publish and is back for the third."""
    with trainer(rank, "qwen3", tp=2, engines=2) as t:
        t.publish("a", 0)
        for engine in t.engines[1:]:
            engine.dies_at = place
        started = time.monotonic()
        assert t.publish("b", 1).unconfirmed == (0 if place == "join" else 1)
        assert time.monotonic() - started < 2 * TIMEOUT_S
        t.assert_held("b", first=1)
        for engine in t.engines[1:]:
            engine.down, engine.instance = False, "second"
            assert t.publisher.engines_lag()
            assert not t.publisher.engines_lag(), "each instance of an engine is reported once"
        assert t.publisher.publish(1).unconfirmed == 0  # the same policy again, for the one that came back
        assert not (t.engines and t.publisher.engines_lag())
        assert all(engine.served == 1 for engine in t.engines)
        t.assert_held("b")


@on_ranks(2)
def test_a_sender_with_a_dead_engine_notifies_the_others(rank: Rank):
    """The engine loses its connections within a bucket, and the trainer's client does not notice until the other
    engine has ended its part of the step, which gloo ends only after its time-out."""
    with trainer(rank, "qwen3", tp=2, engines=2, timeout_s=LONG_TIMEOUT_S) as t:
        t.publish("a", 0)
        survivor_s = []
        if t.engines:
            survivor, dying = t.engines
            dying.dies_at = 3
            dying.death_shows.clear()
            receive = survivor.receive_weights

            async def receive_weights(*arguments: Any) -> float:
                started = time.monotonic()
                try:
                    return await receive(*arguments)
                finally:
                    survivor_s.append(time.monotonic() - started)
                    dying.death_shows.set()

            survivor.receive_weights = receive_weights
        assert t.publish("b", 1).unconfirmed == 1
        t.assert_held("b", first=1)
        assert not t.engines or survivor_s[0] < LONG_TIMEOUT_S / 5


@on_ranks(2)
def test_the_time_of_an_attempt_is_not_time_without_an_engine(rank: Rank):
    """The only engine answers, but its first attempt fails after longer than an engine may be away."""
    with trainer(rank, "qwen3", tp=2, engine={"unavailable_timeout_s": 0.5}) as t:
        for engine in t.engines:
            receive = engine.receive_weights

            async def fail(*_: Any, engine=engine, receive=receive) -> None:
                engine.receive_weights = receive
                await asyncio.sleep(1.0)
                raise EngineError(f"engine {engine.url}: Operation timed out!")

            engine.receive_weights = fail
        assert t.publish("b", 0).version == 0
        t.assert_held("b")


def test_the_reasons_of_a_wait_for_engines_are_on_the_line_that_warns(monkeypatch, caplog):
    """A launcher shows the first line of a warning."""
    monkeypatch.setattr(publisher.time, "sleep", lambda _: None)
    publisher._Retries(3, 60.0).wait((), {"engine-0": "refused", "engine-1": "silent"})
    (line,) = caplog.messages
    assert re.fullmatch(
        r"policy 3: waiting for an engine to .*, [56]\d s left: engine-0: refused; engine-1: silent", line
    )


@pytest.mark.slow
@on_ranks(2)
def test_ranks_wait_as_long_as_an_engine_may_take_to_score(rank: Rank):
    """The engine scores after longer than its updates may take, and within `engine.request_timeout_s`.

    Scoring waits after long requests in the engine's queue; the bound follows from the longest response.
    """
    settings = {"transport": "shared_storage", "timeout_s": 0.3}
    with trainer(rank, "qwen3", tp=2, engine={"unavailable_timeout_s": 0.3}, **settings) as t:
        for engine in t.engines:
            score = engine.score

            async def late(tokens: np.ndarray, score=score) -> np.ndarray:
                await asyncio.sleep(2.5)
                return await score(tokens)

            engine.score = late
        assert t.publisher.publish(0).unconfirmed == 0


@on_ranks(2)
def test_one_that_disagrees_while_another_agrees_is_left_out(rank: Rank):
    with trainer(rank, "qwen3", tp=2, engines=2) as t:
        for engine in t.engines[1:]:
            engine.score_offset = 0.5
        assert t.publisher.publish(0).unconfirmed == 1
        assert not t.engines or t.confirmed() == {FIRST}


@pytest.mark.parametrize("transport", FREEZES)
@on_ranks(2)
def test_one_that_keeps_a_part_of_the_version_before_is_left_out(rank: Rank, transport: str):
    """Its version and its log-probs are as they should be: only its fingerprint, of one expert, is not."""
    with trainer(rank, "qwen3_moe", ep=2, engines=2, transport=transport) as t:
        t.publish("a", 0)
        for engine in t.engines[1:]:
            before = dict(engine.weights)

            def keep(name: str, tensor: torch.Tensor, before=before) -> torch.Tensor:
                return before[name] if "layers.1.mlp.experts.3." in name else tensor

            engine.corrupt = keep
        assert t.publish("b", 1).unconfirmed == 1
        assert not t.engines or t.confirmed() == {FIRST}
        for engine in t.engines:
            engine.corrupt = lambda name, tensor: -tensor
        message = error_of(t.publisher.publish, 2)
        assert "no engine agrees with the trainer" in message
        assert "has other weights than the trainer sent" in message


@on_ranks(2)
def test_a_single_token_that_differs_much_is_not_other_weights(rank: Rank):
    """In 16 bits a router of a mixture of experts may decide otherwise."""
    with trainer(rank, "qwen3", tp=2, probe_tolerance=0.1) as t:
        for engine in t.engines:
            engine.score_offset = np.float32([0, 0, 0.5, 0, 0, 0, 0])
        difference = t.publisher.publish(0).difference
        assert difference.mean == pytest.approx(0.5 / 7)
        assert difference.largest == pytest.approx(0.5)


@on_ranks(2)
def test_one_that_freezes_within_a_bucket_is_not_waited_for(rank: Rank):
    """The second engine freezes within a bucket of the second publish, whose steps may take very long."""
    with trainer(rank, "qwen3", tp=2, engines=2, engine=CHECKS, timeout_s=LONG_TIMEOUT_S) as t:
        t.publish("a", 0)
        for engine in t.engines[1:]:
            engine.freezes_at = 3
        started = time.monotonic()
        assert t.publish("b", 1).unconfirmed == 1
        assert time.monotonic() - started < LONG_TIMEOUT_S / 5
        t.assert_held("b", first=1)


@pytest.mark.parametrize(
    ("transport", "place"),
    [
        (transport, place) if place in FROZEN_OFTEN else slow(transport, place)
        for transport, places in FREEZES.items()
        for place in places
    ],
)
@on_ranks(2)
def test_one_that_freezes_is_left_out_and_training_goes_on(rank: Rank, transport: str, place: str | int):
    """The second engine freezes, but its HTTP server does not: only an update that takes its whole time-out shows it.

    No trainer rank waits for an engine in a training collective: their time-outs are equal.
    """
    with trainer(rank, "qwen3", tp=2, engines=2, engine=CHECKS, transport=transport) as t:
        training = parallel_state.get_tensor_model_parallel_group()
        for group in (training, torch.distributed.group.WORLD):
            torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), group)

        def score(_tokens: np.ndarray) -> np.ndarray:
            torch.distributed.all_reduce(torch.ones(1), group=training)
            return SCORES

        t.actor.score = score
        for engine in t.engines:
            engine.timeout_s = TIMEOUT_S
        t.load("a")
        if place != "join":
            t.publisher.publish(0)
        for engine in t.engines[1:]:
            engine.freezes_at, engine.front_lives = place, True
        assert t.publish("b", 1).unconfirmed == 1
        score(SCORES)
        t.assert_held("b", first=1)


def change(engine: FakeEngine, **values: Any) -> None:
    for name, value in values.items():
        setattr(engine, name, value)


def receive_fails(engine: FakeEngine, error: type[EngineError], text: str, after_s: float = 0.0) -> None:
    """The engine receives nothing and answers this error."""

    async def fail(*_: Any) -> None:
        await asyncio.sleep(after_s)
        raise error(f"engine {engine.url}: {text}")

    engine.receive_weights = fail


FAILURES: dict[str, tuple[Callable[[FakeEngine], None], list[str]]] = {
    "dead": (partial(change, down=True), ["waited 2 s (engine.unavailable_timeout_s)", FIRST, "connection failed"]),
    "dies_for_good": (partial(change, dies_at=2), ["waited 2 s", FIRST]),
    "frozen": (
        partial(receive_fails, error=EngineTimeout, text="no answer", after_s=TIMEOUT_S / 4),
        ["no engine could load it in 3 attempts", "no answer", "aborted"],
    ),
    "refuses": (
        partial(receive_fails, error=EngineRefused, text="does not match the model"),
        [FIRST, "does not match the model"],
    ),
    "cannot_load": (
        partial(receive_fails, error=EngineError, text="out of memory"),
        ["no engine could load it", "out of memory"],
    ),
    "other_weights": (
        partial(change, score_offset=0.5),
        [FIRST, "differ from the trainer's by 0.5", "weight_sync.probe_tolerance"],
    ),
    "not_a_number": (partial(change, score_offset=float("nan")), ["differ from the trainer's by nan"]),
}


@pytest.mark.parametrize("name", FAILURES)
@on_ranks(2)
def test_failures_are_raised_in_time_on_every_rank_and_nothing_is_published(rank: Rank, name: str):
    corrupt, says = FAILURES[name]
    with trainer(rank, "qwen3", pp=2) as t:
        for engine in t.engines:
            corrupt(engine)
        started = time.monotonic()
        message = error_of(t.publisher.publish, 1)
        assert all(part in message for part in says), message
        assert time.monotonic() - started < 3 * TIMEOUT_S
        assert not RunDir(rank.directory).published.exists()
