"""Choose the engine for a request, among a run's monitored engines or among a few fixed engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from dppo_megatron.config import Config
from dppo_megatron.rollout.engines.protocol import Engine, EngineUnavailable, GenerateRequest, InvalidSample
from dppo_megatron.types import Rollout
from dppo_megatron.weights.published import PublishedFollower, PublishedPolicy

from .affinity import PrefixRouter
from .health import HealthRules, State
from .monitored_engine import RECHECK_S, MonitoredEngine
from .registry import Service
from .sampling import Failures

log = logging.getLogger(__name__)


class NoEngineServes(EngineUnavailable):
    """No engine was available for a request in time; the message gives the reason for each engine."""


class EnginePool:
    """Monitors a run's engines. `select` lets `PrefixRouter` choose among engines that serve the published policy.

    An engine that returns or is behind loads the published weights and is scored before it gets a request. Use the pool
    as an asynchronous context manager.

    services: returns the registered engines by name; called again every `engine.health_interval_s`.
    check: raises `EngineError` for an unsuitable engine.
    build: creates a client.
    trainer: if False, a later policy in an engine is from another run and is replaced.
    """

    def __init__(
        self,
        config: Config,
        *,
        services: Callable[[], Mapping[str, Service]],
        published: PublishedFollower,
        build: Callable[[Config, str], Engine],
        check: Callable[[Engine], Awaitable[object]],
        trainer: bool = True,
    ):
        self._config = config
        self._services = services
        self._published = published
        self._build = build
        self._check = check
        self._rules = HealthRules(
            config.engine.health_failures,
            config.engine.health_interval_s,
            publish_s=config.weight_sync.timeout_s if trainer else 0.0,
        )
        self._engines: dict[str, MonitoredEngine] = {}
        self._policy: PublishedPolicy | None = None  # the policy that the engines last received
        self._changed = asyncio.Event()
        self._router = PrefixRouter()
        self._counts: Counter[str] = Counter()
        self._reader: asyncio.Task[None]  # reads the registered engines until `__aexit__`

    async def __aenter__(self) -> EnginePool:
        self._follow(self._services())
        self._reader = asyncio.create_task(self._read_services())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        for engine in self._engines.values():
            await engine.close()

    async def select(self, request: GenerateRequest, failures: Failures) -> MonitoredEngine | None:
        """Return the engine that serves the published policy and suits the request best. Wait if none serves it.

        Avoids engines that returned an invalid sample. An engine that failed otherwise may have recovered. Returns None
        if only avoided engines are alive. Raises `NoEngineServes` after `engine.unavailable_timeout_s`.
        """
        avoid = {name for name, error in failures.items() if isinstance(error, InvalidSample)}
        deadline = time.monotonic() + self._config.engine.unavailable_timeout_s
        while True:
            self._follow_policy()
            if serving := self._serving(avoid):
                return self._router.choose(request, serving)
            if avoid and not any(e.health.alive for e in self._engines.values() if e.name not in avoid):
                return None
            if time.monotonic() > deadline:
                raise NoEngineServes(self._why_none(request.request_id))
            with contextlib.suppress(TimeoutError):  # wait_for may swallow a cancellation in Python 3.11
                async with asyncio.timeout(RECHECK_S):
                    await self._changed.wait()

    def take_metrics(self) -> dict[str, float]:
        """Return the counts of events since the last call, and the number of engines that serve now."""
        counted = {name: float(self._counts[name]) for name in ("engine/deaths", "engine/restarts", "engine/caught_up")}
        self._counts.clear()
        work = _work([engine.take_counts() for engine in self._engines.values()])
        return {"engine/serving": float(len(self._serving())), **counted, **work}

    def _serving(self, avoid: Collection[str] = ()) -> list[MonitoredEngine]:
        return [e for e in self._engines.values() if e.health.state is State.SERVING and e.name not in avoid]

    def _why_none(self, request_id: str) -> str:
        policy = "none" if self._policy is None else f"version {self._policy.version}"
        engines = [f"  {engine.describe()}" for engine in self._engines.values()] or ["  none is registered"]
        return (
            f"request {request_id}: waited {self._config.engine.unavailable_timeout_s:g} s "
            f"(engine.unavailable_timeout_s) for an engine that serves the published policy ({policy}):\n"
            + "\n".join(engines)
        )

    def _follow_policy(self) -> None:
        """Follow the published policy before every request, because no request may run under an outdated policy."""
        policy = self._published.current
        if policy is not self._policy:
            self._policy = policy
            for engine in self._engines.values():
                if policy is not None:
                    engine.serve(policy)

    async def _read_services(self) -> None:
        while True:
            await asyncio.sleep(self._config.engine.health_interval_s)
            try:
                self._follow(await asyncio.to_thread(self._services))
                self._follow_policy()
            except OSError as error:  # the shared file system failed; the next read may succeed
                log.warning("cannot read which engines are registered: %s", error)

    def _follow(self, services: Mapping[str, Service]) -> None:
        for name, service in services.items():
            if (engine := self._engines.get(name)) is None:
                engine = self._engines[name] = MonitoredEngine(
                    service,
                    self._config,
                    rules=self._rules,
                    build=self._build,
                    check=self._check,
                    counts=self._counts,
                    on_change=self._on_change,
                    follow_policy=self._follow_policy,
                )
            elif not engine.move_to(service):
                continue
            if self._policy is not None:
                engine.serve(self._policy)
        for name, engine in self._engines.items():
            if name not in services:
                engine.withdraw()

    def _on_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _work(engines: Sequence[Counter[str]]) -> dict[str, float]:
    """Return metrics of the work that engines report, only for features in use."""
    hits = [c["cached_tokens"] / c["prompt_tokens"] for c in engines if c["prompt_tokens"]]
    total: Counter[str] = sum(engines, Counter())
    metrics = {}
    if hits:
        metrics["engine/prefix_hits"] = total["cached_tokens"] / total["prompt_tokens"]
        metrics["engine/prefix_hits_min"] = min(hits)
    if total["drafted"]:
        metrics["drafts/accepted_share"] = total["accepted"] / total["drafted"]
        metrics["drafts/accepted_per_step"] = total["accepted"] / total["draft_steps"]
        metrics["drafts/saved_share"] = total["accepted"] / total["sampled_tokens"]
    return metrics


class FixedEngines:
    """Provides engines that serve the same weights throughout and are not monitored, as in `dppo-megatron eval`.

    `PrefixRouter` chooses among the engines that have not failed the request.
    """

    def __init__(self, engines: Sequence[Engine]):
        self._engines = tuple(_FixedEngine(f"engine-{i}", engine) for i, engine in enumerate(engines))
        self._router = PrefixRouter()

    async def select(self, request: GenerateRequest, failures: Failures) -> _FixedEngine | None:
        left = [engine for engine in self._engines if engine.name not in failures]
        return self._router.choose(request, left) if left else None

    def take_metrics(self) -> dict[str, float]:
        return {}


class _FixedEngine:
    def __init__(self, name: str, engine: Engine):
        self.name = name
        self.running = 0
        self._engine = engine

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        self.running += request.n
        try:
            return await self._engine.generate(request)
        finally:
            self.running -= request.n
