"""Publish a policy to the engines that answer now, at their current addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.rollout.engines.kinds import build_engine
from dppo_megatron.rollout.engines.protocol import Engine, EngineError, EngineInfo, EngineUnavailable
from dppo_megatron.run_dir import RunDir

from .engine_checks import Confirmation, check_health, load_and_measure, while_healthy
from .registry import Service, engine_services

SILENT_TIMEOUT_S = 1.0  # limit for an engine that did not answer before; a skipped engine is loaded by the orchestrator

Result = TypeVar("Result")


class LiveEngines:
    """Calls every engine that answers, to load weights. Use it inside a single event loop.

    A dead or frozen engine is skipped without waiting: it does not serve until the pool has verified it again.

    services: returns the registered engines by name, by default the run's engines.
    build: creates a client.
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
        """Return self-descriptions by URL for engines that answer, and errors by name for the others."""
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
        by_service = dict(zip(clients, answers, strict=True))
        errors = {service: answer for service, answer in by_service.items() if isinstance(answer, EngineError)}
        self._silent = set(errors)
        return (
            {service.url: answer for service, answer in by_service.items() if not isinstance(answer, EngineError)},
            {service.name: error for service, error in errors.items()},
        )

    async def on(
        self, urls: Iterable[str], call: Callable[[Engine], Coroutine[Any, Any, Result]]
    ) -> dict[str, Result | EngineError]:
        """Await `call` on each engine while it is healthy; return results or engine errors, by URL."""
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
        """Call `load_and_measure` for each of `engines`; return confirmations or errors, by URL.

        An engine that restarted, or meanwhile loaded a version other than `version`, gives an error.
        """

        async def confirm(client: Engine) -> Confirmation:
            instance, fingerprint = engines[client.url].instance, self._config.weight_sync.fingerprint
            confirmation = await load_and_measure(client, instance, load, tokens, fingerprint=fingerprint)
            if confirmation.version != version:
                raise EngineUnavailable(f"engine {client.url}: it loaded other weights during the update")
            return confirmation

        return await self.on(engines, confirm)

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
