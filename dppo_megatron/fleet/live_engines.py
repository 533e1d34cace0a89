"""Publish a policy to the engines that answer now, at their current addresses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.engines.kinds import build_engine
from dppo_megatron.engines.protocol import Engine, EngineError, EngineInfo, EngineUnavailable
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.fingerprint import Fingerprint

from .engine_checks import check_health, while_healthy
from .registry import Service, engine_services

SILENT_TIMEOUT_S = 1.0  # limit for an engine that did not answer before; a skipped engine is loaded by the orchestrator

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Contains the reply of one instance of one engine after it loaded the new weights."""

    url: str
    instance: str
    scores: np.ndarray  # [P - 1] fp32
    load_s: float
    pause_s: float  # part of load_s in which it did not sample
    held: Fingerprint  # fingerprint of its weights; empty if not requested


class LiveEngines:
    """Calls every answering engine, to give it weights. Use it inside one event loop.

    `services` returns the registered engines by name, by default those of the run; `build` creates a client. A dead or
    frozen engine is skipped without waiting: it does not serve until its weights are verified again.
    """

    def __init__(
        self,
        config: Config,
        services: Callable[[], Mapping[str, Service]] | None = None,
        build: Callable[[Config, str], Engine] = build_engine,
    ):
        self._config = config
        self._services = services or partial(engine_services, config, RunDir(config.run.dir))
        self._build = build
        self._clients: dict[Service, Engine] = {}
        self._silent: set[Service] = set()  # engines that did not answer last time

    async def answering(self) -> tuple[dict[str, EngineInfo], dict[str, EngineError]]:
        """Return the self-description of every answering engine, by URL, and the errors of the others, by name."""
        await self._follow_services()
        engine = self._config.engine

        async def check(service: Service, client: Engine) -> EngineInfo | EngineError:
            timeout_s = engine.health_timeout_s
            if service in self._silent:
                timeout_s = min(timeout_s, SILENT_TIMEOUT_S)
            try:
                return await check_health(client, self._config, timeout_s)
            except EngineError as error:
                return error

        clients = dict(self._clients)
        answers = await asyncio.gather(*(check(service, client) for service, client in clients.items()))
        found = dict(zip(clients, answers, strict=True))
        errors = {service: answer for service, answer in found.items() if isinstance(answer, EngineError)}
        self._silent = set(errors)
        return (
            {service.url: answer for service, answer in found.items() if not isinstance(answer, EngineError)},
            {service.name: error for service, error in errors.items()},
        )

    async def on(
        self, urls: Iterable[str], call: Callable[[Engine], Coroutine[Any, Any, Result]]
    ) -> dict[str, Result | EngineError]:
        """Await `call` on each engine while it is healthy; return its result or the engine's error, by URL."""
        by_url = {service.url: client for service, client in self._clients.items()}

        async def call_while_healthy(url: str) -> Result | EngineError:
            try:
                return await while_healthy(by_url[url], self._config, call(by_url[url]))
            except EngineError as error:
                return error

        urls = list(urls)
        return dict(zip(urls, await asyncio.gather(*map(call_while_healthy, urls)), strict=True))

    async def load_and_confirm(
        self,
        version: int,
        engines: Mapping[str, EngineInfo],
        load: Callable[[Engine], Awaitable[float]],
        tokens: np.ndarray,
    ) -> dict[str, Confirmation | EngineError]:
        """Let each of `engines` load `version` and score `tokens`. Return its confirmation or its error, by URL.

        `load` returns the seconds for which the engine paused. An engine that restarted, or loaded another version
        meanwhile, gives an error.
        """

        async def load_and_score(client: Engine) -> Confirmation:
            started = time.perf_counter()
            pause_s = await load(client)
            load_s = time.perf_counter() - started
            scores = await client.score(tokens)
            held = await client.weights_fingerprint() if self._config.weight_sync.fingerprint else {}
            confirmation = Confirmation(client.url, engines[client.url].instance, scores, load_s, pause_s, held)
            info = await client.info()
            if (info.instance, info.version) != (confirmation.instance, version):
                raise EngineUnavailable(f"engine {client.url}: it restarted or loaded other weights during the update")
            return confirmation

        return await self.on(engines, load_and_score)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def _follow_services(self) -> None:
        registered = set(self._services().values())
        for gone in set(self._clients) - registered:
            await self._clients.pop(gone).close()
            self._silent.discard(gone)
        for new in registered - set(self._clients):
            self._clients[new] = self._build(self._config, new.url)
