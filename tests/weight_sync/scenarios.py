"""Trainer ranks over gloo that publish tiny models to fake engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from dppo_megatron.engines.protocol import EngineError, EngineRefused, EngineTimeout
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.published import PublishedPolicy
from tests.support.fakes.engine import SCORES, FakeEngine
from tests.weight_sync.delta_scenarios import RESTARTED, UPDATES, all_changes, deltas
from tests.weight_sync.trainer_ranks import TIMEOUT_S, error_of, trainer

LONG_TIMEOUT_S = 30.0
FREEZES: dict[str, list[str | int]] = {
    "broadcast": ["join", "receive", 3, "loaded", "check", "held"],
    "shared_storage": ["receive", "loaded", "check", "held"],
}
FP8 = {"dtype": "bf16", "quantization": "fp8_block"}
FP8_EMULATED = {"dtype": "bf16", "quantization": "fp8_block_emulated"}


def there_and_back(models: Path, run: Path, **layout: Any) -> dict:
    with trainer(models, run, **layout) as t:
        differences, published = [], []
        for version, policy in enumerate("aba"):
            t.load(policy)
            published.append(t.publisher.publish(version))
            if t.engines:
                differences += [t.difference(policy, i) for i in range(len(t.engines))]
        return {
            "differences": differences,
            "groups": [len(engine.joined) for engine in t.engines],
            "streams": len(getattr(t.publisher._transport, "_streams", ())),
            "published": published,
            "policy": PublishedPolicy.read(RunDir(run).published) if t.engines else None,
        }


def in_fp8(models: Path, run: Path, engine: dict[str, str] = FP8, **layout: Any) -> dict:
    """Two policies to an FP8 engine, then the refusal of one that computes otherwise."""
    with trainer(models, run, engine=engine, **layout) as t:
        unlike, names = [], []
        for version, policy in enumerate("ab"):
            t.load(policy)
            t.publisher.publish(version)
            if t.engines:
                unlike += t.unlike_fp8(policy, emulated=engine == FP8_EMULATED)
                names = sorted(t.engines[0].weights)
        for engine in t.engines:
            engine.score_offset = 1.5
        message = error_of(t.publisher.publish, 2)
        streams = getattr(t.publisher._transport, "_streams", ())
        return {"unlike": unlike, "names": names, "message": message, "buckets": [len(s) for s in streams]}


def colocated(models: Path, run: Path) -> dict:
    """Two publishes to an engine on the trainer's GPUs; at the second turn it does not go to sleep."""
    with trainer(models, run, "qwen3", tp=2, engine={"placement": "colocated"}, transport="shared_storage") as t:
        events: list[str] = []
        at_home = {id(p): p.data for chunk in t.actor.model_chunks for p in chunk.parameters()}

        @contextmanager
        def offloaded():
            parameters = [p for chunk in t.actor.model_chunks for p in chunk.parameters()]
            for parameter in parameters:
                parameter.data = torch.empty(0)
            events.append("offloaded")
            yield 0
            for parameter in parameters:
                parameter.data = at_home[id(parameter)]
            events.append("onloaded")

        t.actor.offloaded = offloaded
        t.actor.score = lambda tokens: events.append("score") or SCORES
        for engine in t.engines:
            engine.events = events
        t.load("a")
        t.publisher.publish(0)
        t.publisher.onload_actor()
        t.load("b")
        t.publisher.publish(1)

        async def stay_awake() -> None:
            raise EngineError("http://127.0.0.1:90: busy")

        for engine in t.engines:
            engine.sleep = stay_awake
        message = error_of(t.publisher.onload_actor)
        differences = [t.difference("b")] if t.engines else []
        return {"events": t.publisher._ranks.gather(events, "events"), "message": message, "differences": differences}


def one_of_two_disagrees(models: Path, run: Path) -> dict:
    with trainer(models, run, "qwen3", tp=2, engines=2) as t:
        if t.engines:
            t.engines[1].score_offset = 0.5
        published = t.publisher.publish(0)
        confirmed = PublishedPolicy.read(RunDir(run).published).confirmed if t.engines else {}
        return {"unconfirmed": published.unconfirmed, "confirmed": confirmed}


def one_of_two_keeps_a_layer(models: Path, run: Path, transport: str) -> dict:
    """The second engine reports the new version, but keeps the previous weights of one expert."""
    with trainer(models, run, "qwen3_moe", ep=2, engines=2, transport=transport) as t:
        t.load("a")
        t.publisher.publish(0)
        for engine in t.engines[1:]:
            before = dict(engine.weights)

            def keep(name: str, tensor: torch.Tensor, before=before) -> torch.Tensor:
                return before[name] if "layers.1.mlp.experts.3." in name else tensor

            engine.corrupt = keep
        t.load("b")
        published = t.publisher.publish(1)
        confirmed = PublishedPolicy.read(RunDir(run).published).confirmed if t.engines else {}
        for engine in t.engines:
            engine.corrupt = lambda name, tensor: -tensor
        message = error_of(t.publisher.publish, 2)
        return {"unconfirmed": published.unconfirmed, "confirmed": confirmed, "message": message}


def one_token_differs(models: Path, run: Path) -> dict:
    with trainer(models, run, "qwen3", tp=2, probe_tolerance=0.1) as t:
        for engine in t.engines:
            engine.score_offset = np.float32([0, 0, 0.5, 0, 0, 0, 0])
        return {"difference": t.publisher.publish(0).difference}


def one_of_two_freezes(models: Path, run: Path) -> dict:
    """The second engine freezes within a bucket of the second publish, whose steps may take very long."""
    checks = {"health_interval_s": 0.1, "health_timeout_s": 0.2, "health_failures": 2}
    with trainer(models, run, "qwen3", tp=2, engines=2, engine=checks, timeout_s=LONG_TIMEOUT_S) as t:
        t.load("a")
        t.publisher.publish(0)
        if t.engines:
            t.engines[1].freezes_at = 3
        t.load("b")
        started = time.monotonic()
        second = t.publisher.publish(1)
        return {
            "unconfirmed": second.unconfirmed,
            "seconds": time.monotonic() - started,
            "differences": [t.difference("b")] if t.engines else [],
        }


def one_of_two_freezes_at(models: Path, run: Path, place: str | int, transport: str) -> dict:
    """The second engine freezes, but its HTTP server does not: only an update that takes its whole time-out shows it.
    The trainer's own collectives have the same time-out."""
    checks = {"health_interval_s": 0.1, "health_timeout_s": 0.2, "health_failures": 2}
    with trainer(models, run, "qwen3", tp=2, engines=2, engine=checks, transport=transport) as t:
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
        if t.engines:
            t.engines[1].freezes_at, t.engines[1].front_lives = place, True
        t.load("b")
        published = t.publisher.publish(1)
        score(SCORES)
        return {"unconfirmed": published.unconfirmed, "differences": [t.difference("b")] if t.engines else []}


def one_of_two_dies(models: Path, run: Path, place: str | int) -> dict:
    """The second engine dies at `place` of the second publish and is back for the third."""
    with trainer(models, run, "qwen3", tp=2, engines=2) as t:
        t.load("a")
        t.publisher.publish(0)
        if t.engines:
            t.engines[1].dies_at = place
        t.load("b")
        started = time.monotonic()
        second = t.publisher.publish(1)
        seconds = time.monotonic() - started
        lags = []
        if t.engines:
            differences = [t.difference("b")]
            t.engines[1].down = False
            t.engines[1].instance = "second"
            lags = [t.publisher.engines_lag(), t.publisher.engines_lag()]
        third = t.publisher.publish(1)  # the same policy again, for the one that came back
        if t.engines:
            lags.append(t.publisher.engines_lag())
        return {
            "unconfirmed": [second.unconfirmed, third.unconfirmed],
            "lags": lags,
            "seconds": seconds,
            "served": [engine.served for engine in t.engines],
            "differences": [*differences, t.difference("b"), t.difference("b", 1)] if t.engines else [],
        }


def one_of_two_dies_unnoticed(models: Path, run: Path) -> dict:
    """It loses its connections within a bucket, and the trainer's client does not notice until the other engine has
    ended its own part of the step."""
    with trainer(models, run, "qwen3", tp=2, engines=2, timeout_s=LONG_TIMEOUT_S) as t:
        t.load("a")
        t.publisher.publish(0)
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
        t.load("b")
        second = t.publisher.publish(1)
        return {
            "unconfirmed": second.unconfirmed,
            "survivor_s": survivor_s,
            "differences": [t.difference("b")] if t.engines else [],
        }


def fails_once(models: Path, run: Path) -> dict:
    """The only engine answers, but its first attempt fails after longer than an engine may be away."""
    with trainer(models, run, "qwen3", tp=2, engine={"unavailable_timeout_s": 0.5}) as t:
        for engine in t.engines:
            receive = engine.receive_weights

            async def fail(*_: Any, engine=engine, receive=receive) -> None:
                engine.receive_weights = receive
                await asyncio.sleep(1.0)
                raise EngineError(f"engine {engine.url}: Operation timed out!")

            engine.receive_weights = fail
        t.load("b")
        published = t.publisher.publish(0)
        return {"version": published.version, "differences": [t.difference("b")] if t.engines else []}


def scores_late(models: Path, run: Path) -> dict:
    """The engine scores after longer than its updates may take, and within `engine.request_timeout_s`."""
    settings = {"transport": "shared_storage", "timeout_s": 0.3}
    with trainer(models, run, "qwen3", tp=2, engine={"unavailable_timeout_s": 0.3}, **settings) as t:
        for engine in t.engines:
            score = engine.score

            async def late(tokens: np.ndarray, score=score) -> np.ndarray:
                await asyncio.sleep(2.5)
                return await score(tokens)

            engine.score = late
        return {"unconfirmed": t.publisher.publish(0).unconfirmed}


def fails(models: Path, run: Path, corrupt: Callable[[FakeEngine], None], **settings: Any) -> dict:
    """Return the error of a publish to one engine with a fault, on every rank, and its duration."""
    with trainer(models, run, "qwen3", **{"pp": 2, **settings}) as t:
        for engine in t.engines:
            corrupt(engine)
        started = time.monotonic()
        everyone = t.publisher._ranks.gather(error_of(t.publisher.publish, 1), "messages")
        written = RunDir(run).published.exists()
        return {"messages": everyone, "seconds": time.monotonic() - started, "written": written}


def overflows(models: Path, run: Path, **weight_sync: Any) -> dict:
    """Publish a policy that fits, then one with a value beyond fp16, which only the last rank has."""
    with trainer(models, run, "qwen3", tp=2, engine={"dtype": "fp16"}, **weight_sync) as t:
        t.load("a")
        t.publisher.publish(0)
        before = dict(t.engines[0].weights) if t.engines else {}
        t.load("b")
        if torch.distributed.get_rank() == 1:
            t.actor.model_chunks[0].decoder.layers[1].mlp.linear_fc2.weight.data[3, 4] = 70_000.0
        everyone = [""] * 2
        torch.distributed.all_gather_object(everyone, error_of(t.publisher.publish, 1))
        held = t.engines[0].weights if t.engines else {}
        kept = all(torch.equal(held[name], tensor) for name, tensor in before.items())
        return {
            "messages": everyone,
            "kept": kept and held.keys() == before.keys(),
            "dtypes": {tensor.dtype for tensor in before.values()},
            "left": sorted(path.name for path in run.glob("weights/*1*")),
        }


def change(engine: FakeEngine, **values: Any) -> None:
    for name, value in values.items():
        setattr(engine, name, value)


def receive_fails(engine: FakeEngine, error: type[EngineError], text: str, after_s: float = 0.0) -> None:
    """The engine receives nothing and answers this error."""

    async def fail(*_: Any) -> None:
        await asyncio.sleep(after_s)
        raise error(f"engine {engine.url}: {text}")

    engine.receive_weights = fail


SCENARIOS: dict[str, Callable[[Path, Path], dict]] = {
    "tensor": partial(there_and_back, family="qwen3", tp=2),
    "pipeline": partial(there_and_back, family="qwen3", pp=2),
    "data": partial(there_and_back, family="qwen3", engines=2),
    "expert": partial(there_and_back, family="qwen3_moe", ep=2),
    "expert_in_tensor": partial(there_and_back, family="qwen3_moe", tp=2, ep=2),
    "shared_storage": partial(there_and_back, family="qwen3", tp=2, transport="shared_storage"),
    "fp8_broadcast": partial(in_fp8, family="wide", tp=2, bucket_bytes=1 << 20),
    "fp8_broadcast_small_buckets": partial(in_fp8, family="qwen3_moe", ep=2),
    "fp8_shared_storage": partial(in_fp8, family="wide", pp=2, transport="shared_storage"),
    "fp8_emulated_broadcast": partial(in_fp8, engine=FP8_EMULATED, family="qwen3_moe", ep=2),
    "fp8_emulated_shared_storage": partial(
        in_fp8, engine=FP8_EMULATED, family="wide", tp=2, transport="shared_storage"
    ),
    "deltas_short": partial(deltas, updates=RESTARTED + 4, family="qwen3", tp=2),
    "deltas_tied": partial(deltas, updates=UPDATES, family="tied", tp=2),
    "deltas_dense": partial(deltas, updates=UPDATES, family="wide", pp=2),
    "deltas_moe": partial(deltas, updates=UPDATES, family="qwen3_moe", ep=2),
    "deltas_fp8": partial(deltas, updates=RESTARTED + 4, quantization="fp8_block", family="wide", tp=2),
    "deltas_fp8_emulated": partial(
        deltas, updates=RESTARTED + 4, quantization="fp8_block_emulated", family="wide", tp=2
    ),
    "all_changes": all_changes,
    "colocated": colocated,
    "dies_at_join": partial(one_of_two_dies, place="join"),
    "dies_at_receive": partial(one_of_two_dies, place="receive"),
    "dies_at_bucket": partial(one_of_two_dies, place=3),
    "dies_unnoticed": one_of_two_dies_unnoticed,
    "fails_once": fails_once,
    "scores_late": scores_late,
    "disagrees": one_of_two_disagrees,
    **{f"keeps_{transport}": partial(one_of_two_keeps_a_layer, transport=transport) for transport in FREEZES},
    **{f"overflows_{transport}": partial(overflows, transport=transport) for transport in FREEZES},
    "one_token": one_token_differs,
    "freezes": one_of_two_freezes,
    **{
        f"freezes_at_{place}_{transport}": partial(one_of_two_freezes_at, place=place, transport=transport)
        for transport, places in FREEZES.items()
        for place in places
    },
    "dead": partial(fails, corrupt=partial(change, down=True)),
    "dies_for_good": partial(fails, corrupt=partial(change, dies_at=2)),
    "frozen": partial(
        fails, corrupt=partial(receive_fails, error=EngineTimeout, text="no answer", after_s=TIMEOUT_S / 4)
    ),
    "refuses": partial(fails, corrupt=partial(receive_fails, error=EngineRefused, text="does not match the model")),
    "cannot_load": partial(fails, corrupt=partial(receive_fails, error=EngineError, text="out of memory")),
    "other_weights": partial(fails, corrupt=partial(change, score_offset=0.5)),
    "not_a_number": partial(fails, corrupt=partial(change, score_offset=float("nan"))),
}


def on_rank(rank: int, scenario: Callable[[Path, Path], dict], models: Path, run: Path) -> dict:
    return scenario(models, run)
