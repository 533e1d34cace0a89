"""The engines a policy is published to: those that answer now, at the addresses they have now."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.rollout.engine import (
    Engine,
    EngineError,
    EngineIncompatible,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
)
from dppo_megatron.rollout.engine_watch import probe_health, while_healthy
from dppo_megatron.services import Service

log = logging.getLogger(__name__)

RETRY_S = 0.2
ATTEMPTS = 3  # at loading, by engines that answer and fail
PATIENCE_S = 1.0  # with an engine that was silent before: leaving it out costs it one load by the orchestrator


class WeightSyncError(ExpectedError, RuntimeError):
    """The engines do not serve the weights the trainer holds."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """One life of one engine serves the new weights: it loaded them and scored the probe after it."""

    url: str
    instance: str
    scores: np.ndarray  # [P - 1] fp32
    load_s: float


class LiveEngines:
    """Loads weights into every engine that answers. Used inside one event loop.

    `book` gives the engines that are announced at this moment, by name; `build` makes a client.
    """

    def __init__(
        self,
        config: Config,
        book: Callable[[], Mapping[str, Service]],
        build: Callable[[Config, str], Engine],
    ):
        self._config = config
        self._book = book
        self._build = build
        self._clients: dict[Service, Engine] = {}
        self._silent: set[Service] = set()  # did not answer when last asked

    async def publish(
        self, version: int, load: Callable[[Engine], Awaitable[None]], probe: np.ndarray
    ) -> tuple[list[Confirmation], int]:
        """At least one confirmation, and the number of engines left out because they failed.

        `load` makes one engine serve `version`. An engine that is dead or freezes meanwhile is left out and not waited
        for: the orchestrator loads and verifies it before it samples again. With none left, waits for one to come back.
        Raises `WeightSyncError` when an engine refuses the weights, and when none is there for
        `engine.unavailable_timeout_s` or those that are fail to load them.
        """
        limit = self._config.engine.unavailable_timeout_s
        deadline = time.monotonic() + limit
        attempts = 0  # that engines answered and failed at
        told = None
        while True:
            outcomes = await self._ask_all(version, load, probe)
            confirmed = [outcome for outcome in outcomes.values() if isinstance(outcome, Confirmation)]
            failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, EngineError)}
            if confirmed:
                for name, error in failed.items():
                    log.warning("policy %d is published without %s: %s", version, name, error)
                return confirmed, len(failed)
            attempts += any(not isinstance(error, EngineUnavailable | EngineTimeout) for error in failed.values())
            reasons = "\n".join(f"  {name}: {error}" for name, error in failed.items()) or "  none is announced"
            if attempts >= ATTEMPTS:
                raise WeightSyncError(f"policy version {version}: no engine could load it:\n{reasons}")
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"policy version {version}: waited {limit:g} s (engine.unavailable_timeout_s) for an engine to "
                    f"publish it to:\n{reasons}"
                )
            if reasons != told:
                log.warning("policy %d: waiting for an engine to publish it to:\n%s", version, reasons)
            told = reasons
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def _ask_all(
        self, version: int, load: Callable[[Engine], Awaitable[None]], probe: np.ndarray
    ) -> dict[str, Confirmation | EngineError]:
        await self._follow_book()
        clients = dict(self._clients)
        outcomes = await asyncio.gather(*(self._confirm(*entry, version, load, probe) for entry in clients.items()))
        return {service.name: outcome for service, outcome in zip(clients, outcomes, strict=True)}

    async def _confirm(
        self,
        service: Service,
        client: Engine,
        version: int,
        load: Callable[[Engine], Awaitable[None]],
        probe: np.ndarray,
    ) -> Confirmation | EngineError:
        engine = self._config.engine
        patience = min(PATIENCE_S, engine.health_timeout_s) if service in self._silent else engine.health_timeout_s
        try:
            instance = (await probe_health(client, patience)).instance
            self._silent.discard(service)
            confirmation = await while_healthy(client, engine, _load_and_score(client, instance, load, probe))
            info = await client.info()
            if (info.instance, info.version) != (instance, version):
                raise EngineUnavailable(f"engine {client.url}: restarted, or loaded with other weights, meanwhile")
            return confirmation
        except (EngineRefused, EngineIncompatible) as error:
            raise WeightSyncError(f"policy version {version}: {error}") from error
        except EngineError as error:
            self._silent.add(service)
            return error

    async def _follow_book(self) -> None:
        announced = set(self._book().values())
        for gone in set(self._clients) - announced:
            await self._clients.pop(gone).close()
            self._silent.discard(gone)
        for new in announced - set(self._clients):
            self._clients[new] = self._build(self._config, new.url)


async def _load_and_score(
    client: Engine, instance: str, load: Callable[[Engine], Awaitable[None]], probe: np.ndarray
) -> Confirmation:
    started = time.perf_counter()
    await load(client)
    load_s = time.perf_counter() - started
    return Confirmation(client.url, instance, await client.score(probe), load_s)
