"""Trainer ranks over gloo that publish tiny models to fake engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dppo_megatron import hf
from dppo_megatron.engines.protocol import EngineError, EngineRefused, EngineTimeout
from dppo_megatron.fleet.live_engines import LiveEngines
from dppo_megatron.fleet.registry import Service
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weight_sync import WeightSyncError, build_publisher
from dppo_megatron.weight_sync.engine_thread import EngineThread
from dppo_megatron.weights.published import PublishedPolicy
from tests.support.configs import make_config
from tests.support.fakes.engine import SCORES, FakeEngine
from tests.support.models import build_gpt
from tests.support.ranks import megatron_group

TIMEOUT_S = 2.0
LONG_TIMEOUT_S = 30.0
FP8 = {"dtype": "bf16", "quantization": "fp8_block"}


@dataclass
class Trainer:
    """What a scenario works with on one rank; `engines` act on rank 0 alone."""

    models: Path
    run: Path
    publisher: Any = None
    actor: Any = None
    engines: list[FakeEngine] = field(default_factory=list)

    def load(self, policy: str) -> None:
        hf.load_into(self.actor.model_chunks, self.models / f"{self.actor.family}-{policy}")

    def difference(self, policy: str, engine: int = 0) -> float:
        """Largest difference between what the engine holds and the policy's directory; inf where names differ."""
        source = hf.SafetensorsDirectory(self.models / f"{self.actor.family}-{policy}")
        held = self.engines[engine].weights
        if held.keys() != set(source.tensors):
            return float("inf")
        return max(float((held[name] - source.tensor(name)).abs().max()) for name in held)

    def unlike_fp8(self, policy: str) -> list[str]:
        """Names of the tensors that the engine does not hold bit for bit as the policy's bf16 weights in FP8."""
        source = hf.SafetensorsDirectory(self.models / f"{self.actor.family}-{policy}")
        plain = ((name, source.tensor(name).bfloat16()) for name in source.tensors)
        expected, held = dict(hf.fp8.quantize_projections(plain)), self.engines[0].weights

        def same(name: str) -> bool:
            if name not in expected or name not in held or held[name].dtype != expected[name].dtype:
                return False
            return torch.equal(held[name].view(torch.uint8), expected[name].view(torch.uint8))

        return sorted(name for name in expected.keys() | held.keys() if not same(name))


@contextmanager
def trainer(models: Path, run: Path, family: str, *, tp=1, pp=1, ep=1, engines=1, engine=(), **weight_sync):
    run.mkdir(parents=True, exist_ok=True)
    with megatron_group(run, tp, pp, ep=ep):
        model = models / f"{family}-a"
        config = make_config(
            run={"dir": str(run)},
            model={"path": str(model)},
            engine={"dtype": "fp32", "unavailable_timeout_s": TIMEOUT_S} | dict(engine),
            weight_sync={"transport": "broadcast", "bucket_bytes": 6000, "timeout_s": TIMEOUT_S, **weight_sync},
        )
        hf_config = hf.read_hf_config(model)
        actor = SimpleNamespace(
            model_chunks=build_gpt(hf_config, tp, pp, None, ep),
            hf=hf_config,
            family=family,
            layout=SimpleNamespace(device=torch.device("cpu")),
            score=lambda tokens: SCORES,
        )
        t = Trainer(models, run, actor=actor)
        thread = None
        if torch.distributed.get_rank() == 0:
            t.engines = [FakeEngine(f"http://127.0.0.1:{90 + i}") for i in range(engines)]
            by_url = {engine.url: engine for engine in t.engines}
            book = {f"engine-{i}": Service(f"engine-{i}", url, 0, "") for i, url in enumerate(by_url)}
            thread = EngineThread(lambda: LiveEngines(config, lambda: book, lambda _, url: by_url[url]))
        t.publisher = build_publisher(config, actor, thread, None if thread is None else SCORES)
        try:
            yield t
        finally:
            t.publisher.close()


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


def in_fp8(models: Path, run: Path, **layout: Any) -> dict:
    """Two policies to an FP8 engine, then the refusal of one that computes otherwise."""
    with trainer(models, run, engine=FP8, **layout) as t:
        unlike, names = [], []
        for version, policy in enumerate("ab"):
            t.load(policy)
            t.publisher.publish(version)
            if t.engines:
                unlike += t.unlike_fp8(policy)
                names = sorted(t.engines[0].weights)
        for engine in t.engines:
            engine.score_offset = 1.5
        try:
            t.publisher.publish(2)
            message = "nothing raised"
        except WeightSyncError as error:
            message = str(error)
        streams = getattr(t.publisher._transport, "_streams", ())
        return {"unlike": unlike, "names": names, "message": message, "buckets": [len(s) for s in streams]}


def colocated(models: Path, run: Path) -> dict:
    """Two publishes to an engine on the trainer's GPUs; at the second turn it does not go to sleep."""
    settings = {"engine": {"placement": "colocated"}, "transport": "shared_storage", "bucket_bytes": None}
    with trainer(models, run, "qwen3", tp=2, **settings) as t:
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
        try:
            t.publisher.onload_actor()
            message = "nothing raised"
        except WeightSyncError as error:
            message = str(error)
        differences = [t.difference("b")] if t.engines else []
        return {"events": t.publisher._ranks.gather(events, "events"), "message": message, "differences": differences}


def one_of_two_disagrees(models: Path, run: Path) -> dict:
    with trainer(models, run, "qwen3", tp=2, engines=2) as t:
        if t.engines:
            t.engines[1].score_offset = 0.5
        published = t.publisher.publish(0)
        confirmed = PublishedPolicy.read(RunDir(run).published).confirmed if t.engines else {}
        return {"unconfirmed": published.unconfirmed, "confirmed": confirmed}


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
    """Its connections are gone within a bucket, and the trainer's client of it hears nothing until the other engine has
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

            async def receive_weights(*arguments: Any) -> None:
                started = time.monotonic()
                try:
                    await receive(*arguments)
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


def fails(models: Path, run: Path, corrupt: Callable[[FakeEngine], None], **settings: Any) -> dict:
    """What a publish to one engine with a fault raises, on every rank, and when."""
    with trainer(models, run, "qwen3", **{"pp": 2, **settings}) as t:
        for engine in t.engines:
            corrupt(engine)
        started = time.monotonic()
        try:
            t.publisher.publish(1)
            message = "nothing raised"
        except WeightSyncError as error:
            message = str(error)
        everyone = t.publisher._ranks.gather(message, "messages")
        written = RunDir(run).published.exists()
        return {"messages": everyone, "seconds": time.monotonic() - started, "written": written}


def change(engine: FakeEngine, **values: Any) -> None:
    for name, value in values.items():
        setattr(engine, name, value)


def _frozen(engine: FakeEngine) -> None:
    """Says nothing and takes nothing until the client gives up."""

    async def nothing(*_: Any) -> None:
        await asyncio.sleep(TIMEOUT_S / 4)
        raise EngineTimeout(f"engine {engine.url}: no answer")

    engine.receive_weights = nothing


def _refuses(engine: FakeEngine) -> None:
    async def refuse(*_: Any) -> None:
        raise EngineRefused(f"engine {engine.url}: not the served model")

    engine.receive_weights = refuse


def _fails(engine: FakeEngine) -> None:
    async def fail(*_: Any) -> None:
        raise EngineError(f"engine {engine.url}: out of memory")

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
    "colocated": colocated,
    "dies_at_join": partial(one_of_two_dies, place="join"),
    "dies_at_receive": partial(one_of_two_dies, place="receive"),
    "dies_at_bucket": partial(one_of_two_dies, place=3),
    "dies_unnoticed": one_of_two_dies_unnoticed,
    "fails_once": fails_once,
    "disagrees": one_of_two_disagrees,
    "one_token": one_token_differs,
    "freezes": one_of_two_freezes,
    "dead": partial(fails, corrupt=partial(change, down=True)),
    "dies_for_good": partial(fails, corrupt=partial(change, dies_at=2)),
    "frozen": partial(fails, corrupt=_frozen),
    "refuses": partial(fails, corrupt=_refuses),
    "cannot_load": partial(fails, corrupt=_fails),
    "other_weights": partial(fails, corrupt=partial(change, score_offset=0.5)),
    "not_a_number": partial(fails, corrupt=partial(change, score_offset=float("nan"))),
    "other_weights_stored": partial(fails, corrupt=partial(change, score_offset=0.5), transport="shared_storage"),
}


def on_rank(rank: int, scenario: Callable[[Path, Path], dict], models: Path, run: Path) -> dict:
    return scenario(models, run)
