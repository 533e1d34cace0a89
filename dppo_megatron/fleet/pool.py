"""Engines that may die, freeze, lie and come back, behind one call that goes on as long as one of them serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace

from dppo_megatron.config import Config
from dppo_megatron.engines.protocol import (
    Engine,
    EngineError,
    EngineIncompatible,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    GenerateRequest,
    InvalidSample,
)
from dppo_megatron.types import Rollout
from dppo_megatron.weights.published import PublishedFollower

from .health import Delivered, Failed, HealthRules, Published, State
from .monitored_engine import MonitoredEngine
from .registry import Service

log = logging.getLogger(__name__)

ATTEMPTS = 8  # of one request; a request that ends every engine it meets must not do so for ever
RECHECK_S = 0.2  # how often a request that waits for an engine looks for a newly published policy


class NoEngineServes(EngineUnavailable):
    """No engine could be given a request in time; the message says of each why."""


class EnginePool:
    """Sends each request to the least loaded engine that is proven to serve the published policy.

    Every engine of `book` (name -> where it is announced at this moment) is probed in the background. The requests of
    one that dies are sent again, unchanged, to another: the same seeds under the same weights give the same tokens.
    One that comes back, or is behind, is loaded with the published weights and scored before it gets a request.

    An asynchronous context manager; `generate` as `Engine.generate`. `check` raises `EngineError` for an engine that
    does not suit the run; `build` makes a client.
    """

    def __init__(
        self,
        config: Config,
        *,
        book: Callable[[], Mapping[str, Service]],
        published: PublishedFollower,
        build: Callable[[Config, str], Engine],
        check: Callable[[Engine], Awaitable[object]],
    ):
        self._config = config
        self._book = book
        self._published = published
        self._build = build
        self._check = check
        self._rules = HealthRules(
            config.engine.health_failures, config.engine.health_interval_s, publish_s=config.weight_sync.timeout_s
        )
        self._engines: dict[str, MonitoredEngine] = {}
        self._policy = None  # as last told to the engines
        self._changed = asyncio.Event()
        self._counts: Counter[str] = Counter()
        self._reader: asyncio.Task | None = None

    async def __aenter__(self) -> EnginePool:
        self._follow(self._book())
        self._reader = asyncio.create_task(self._read_book())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        for engine in self._engines.values():
            await engine.close()

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        """Raises `InvalidSample` when every engine that could be asked returned invalid samples, `EngineRefused` when
        one refused it, and `NoEngineServes` when none served for `engine.unavailable_timeout_s`."""
        invalid: dict[str, InvalidSample] = {}  # by the name of the engine
        for attempt in range(ATTEMPTS):
            engine = await self._wait_for_one(request, invalid)
            if engine is None:
                break
            life = engine.life
            # The server may still be busy ending the attempt before, and takes each id once.
            again = replace(request, request_id=f"{request.request_id}~{attempt}") if attempt else request
            try:
                rollouts = await engine.generate(again)
            except (EngineRefused, EngineIncompatible):
                raise
            except EngineError as error:
                if isinstance(error, InvalidSample):
                    invalid[engine.name] = error
                # Slow is not broken: whether an engine that takes too long still works, its probes tell.
                slow = isinstance(error, EngineTimeout) and not engine.health.silent
                if engine.life == life and not slow:
                    engine.apply(Failed(str(error)))
                last = error
                self._count_retry(error)
            else:
                if engine.life == life:
                    engine.apply(Delivered())
                return rollouts
        raise last

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call, and how many engines serve now."""
        names = ("engine/deaths", "engine/restarts", "engine/caught_up", "engine/retried_requests")
        counted = {name: float(self._counts[name]) for name in (*names, "rollout/invalid_samples")}
        self._counts.clear()
        return {"engine/serving": float(len(self._serving())), **counted}

    def _count_retry(self, error: EngineError) -> None:
        self._counts["engine/retried_requests"] += 1
        if isinstance(error, InvalidSample):
            self._counts["rollout/invalid_samples"] += 1
        log.warning("sending a request again: %s", error)

    async def _wait_for_one(self, request: GenerateRequest, avoid: Collection[str]) -> MonitoredEngine | None:
        """The engine to ask next, or None when only those to avoid are alive."""
        deadline = time.monotonic() + self._config.engine.unavailable_timeout_s
        while True:
            self._follow_policy()
            if serving := self._serving(avoid):
                return min(serving, key=lambda engine: engine.running)
            if avoid and not any(e.health.alive for e in self._engines.values() if e.name not in avoid):
                return None
            if time.monotonic() > deadline:
                raise NoEngineServes(self._why_none(request))
            with contextlib.suppress(TimeoutError):  # not wait_for, which in Python 3.11 may swallow a cancellation
                async with asyncio.timeout(RECHECK_S):
                    await self._changed.wait()

    def _serving(self, avoid: Collection[str] = ()) -> list[MonitoredEngine]:
        return [e for e in self._engines.values() if e.health.state is State.SERVING and e.name not in avoid]

    def _why_none(self, request: GenerateRequest) -> str:
        policy = "none" if self._policy is None else f"version {self._policy.version}"
        engines = [f"  {engine.describe()}" for engine in self._engines.values()] or ["  none is announced"]
        return (
            f"request {request.request_id}: waited {self._config.engine.unavailable_timeout_s:g} s "
            f"(engine.unavailable_timeout_s) for an engine that serves the published policy ({policy}):\n"
            + "\n".join(engines)
        )

    def _follow_policy(self) -> None:
        """Before every request: no engine may be given one under a policy that is no longer the published one."""
        policy = self._published.current
        if policy is not self._policy:
            self._policy = policy
            for engine in self._engines.values():
                self._tell_policy(engine)

    def _tell_policy(self, engine: MonitoredEngine) -> None:
        if self._policy is not None:
            engine.policy = self._policy
            engine.apply(Published(self._policy.version, self._policy.confirmed.get(engine.url)))

    async def _read_book(self) -> None:
        while True:
            await asyncio.sleep(self._config.engine.health_interval_s)
            try:
                self._follow(await asyncio.to_thread(self._book))
                self._follow_policy()
            except OSError as error:  # of a shared file system; the next look may succeed
                log.warning("cannot read which engines are announced: %s", error)

    def _follow(self, book: Mapping[str, Service]) -> None:
        for name, service in book.items():
            engine = self._engines.get(name)
            if engine is None:
                engine = self._engines[name] = MonitoredEngine(
                    name,
                    self._config,
                    rules=self._rules,
                    build=self._build,
                    check=self._check,
                    counts=self._counts,
                    on_change=self._on_change,
                )
            if engine.move_to(service):
                self._tell_policy(engine)
        for name, engine in self._engines.items():
            if name not in book:
                engine.withdraw()

    def _on_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
