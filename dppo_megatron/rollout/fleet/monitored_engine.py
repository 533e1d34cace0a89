"""Monitor an engine in the pool: client, health, monitoring task, and running requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.rollout.engines.protocol import (
    Engine,
    EngineError,
    EngineIncompatible,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    GenerateRequest,
)
from dppo_megatron.types import Rollout
from dppo_megatron.weights.published import PublishedPolicy

from .engine_checks import check_health, check_weights, load_and_measure
from .health import EngineHealth, HealthRules, State
from .registry import Service

Values = ParamSpec("Values")

log = logging.getLogger(__name__)

RECHECK_S = 0.2  # interval at which a waiting request checks for a newly published policy
_ROUTINE = {State.STALE, State.SERVING}  # every publish changes between these states
_BAD = {State.SUSPECT, State.DEAD}


class MonitoredEngine:
    """Checks an engine every `engine.health_interval_s`, updates `health`, and verifies the weights if needed."""

    def __init__(
        self,
        service: Service,
        config: Config,
        *,
        rules: HealthRules,
        build: Callable[[Config, str], Engine],
        check: Callable[[Engine], Awaitable[object]],
        counts: Counter[str],
        on_change: Callable[[], None],
        follow_policy: Callable[[], None],
    ):
        self.name = service.name
        self.health = EngineHealth(rules, since=time.monotonic())
        self.policy: PublishedPolicy | None = None  # the policy that the engine is to serve
        self.running = 0  # samples
        self._config = config
        self._build = build
        self._check = check
        self._counts = counts
        self._on_change = on_change
        self._follow_policy = follow_policy  # calls `serve` if a policy was published
        self._epoch = 0  # counts deaths, restarts and exclusions; earlier requests do not count for `health`
        self._service = service
        self._registered = True
        self._client = build(config, service.url)
        self._lost = asyncio.Event()  # set when the running requests are abandoned
        self._wake = asyncio.Event()  # set to check the engine at once
        self._monitor_task = asyncio.create_task(self._monitor())
        self._monitor_task.add_done_callback(_report_failure)
        self._verification: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return self._service.url

    def describe(self) -> str:
        reason = f": {self.health.reason}" if self.health.reason else ""
        return (
            f"{self.name} at {self.url}: {self.health.state} for {time.monotonic() - self.health.since:.0f} s{reason}"
        )

    def move_to(self, service: Service) -> bool:
        """Follow the registry. Return True if the address changed, which means a new instance."""
        self._registered = True
        if service == self._service:
            return False
        self._counts["engine/restarts"] += 1
        self._service = service
        self._connect()
        self.apply(EngineHealth.registered)
        return True

    def withdraw(self) -> None:
        """Mark the engine as no longer registered. Answers do not count until it is registered again."""
        self._registered = False
        if self.health.state is not State.DEAD:
            self.apply(EngineHealth.vanished)

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        """Call `Engine.generate`; success and failure count for the engine's health.

        Raises `EngineUnavailable` as soon as the engine dies or a publish excludes it, and `EngineError` if tokens come
        from a policy for which the engine was not verified.
        """
        epoch = self._epoch
        try:
            rollouts = await self._generate(request)
        except (EngineRefused, EngineIncompatible):
            raise  # the engine did not fail
        except EngineError as error:
            # A slow engine may still work. The health checks decide that.
            slow = isinstance(error, EngineTimeout) and not self.health.failed_checks
            if self._epoch == epoch and not slow:
                self.apply(EngineHealth.request_failed, str(error))
            raise
        if self._epoch == epoch:
            self.apply(EngineHealth.request_done)
        return rollouts

    async def _generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        assert self.health.verified is not None  # only engines that serve are selected
        _, admitted = self.health.verified
        call = asyncio.ensure_future(self._client.generate(request))
        gone = asyncio.ensure_future(self._lost.wait())
        self.running += request.n
        try:
            await asyncio.wait((call, gone), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise EngineUnavailable(f"{self.name} was lost during {request.request_id}: {self.health.reason}")
            rollouts = call.result()
            versions = np.concatenate([rollout.versions for rollout in rollouts])
            oldest, newest = versions.min(initial=admitted), versions.max(initial=admitted)
            verified = admitted if newest <= admitted else await self._verified_up_to(newest, gone)
        finally:
            self.running -= request.n
            call.cancel()
            gone.cancel()
        if oldest < admitted or newest > verified:
            raise EngineError(
                f"{self.name}: {request.request_id} has tokens of policies {oldest} to {newest}; the engine is "
                f"verified for {admitted} to {verified}"
            )
        return rollouts

    async def _verified_up_to(self, newest: int, gone: asyncio.Future[Literal[True]]) -> int:
        """Return the latest policy that was verified in the engine. Wait while the trainer may be publishing `newest`.

        The engines load a policy before it is published, and a publish may exclude the engine.
        """
        deadline = time.monotonic() + self.health.rules.publish_s
        while True:
            self._follow_policy()
            _, verified = (not gone.done() and self.health.verified) or ("", -1)
            if verified >= newest or gone.done() or time.monotonic() > deadline:
                return verified
            await asyncio.wait((gone,), timeout=RECHECK_S)

    def take_counts(self) -> Counter[str]:
        """Return the client's work counts since the last call, and reset them."""
        counts, self._client.counts = self._client.counts, Counter()
        return counts

    def serve(self, policy: PublishedPolicy) -> None:
        """Set the published policy that the engine is to serve."""
        self.policy = policy
        confirmed = policy.confirmed.get(self.url)
        self.apply(EngineHealth.policy_published, policy.version, confirmed)
        if confirmed != self.health.instance:  # running requests may have tokens from unverified weights
            self._abandon_requests()
        if self.health.state is not State.SERVING:
            self._wake.set()

    def apply(
        self,
        event: Callable[Concatenate[EngineHealth, float, Values], EngineHealth],
        *values: Values.args,
        **named: Values.kwargs,
    ) -> None:
        """Apply an `EngineHealth` event, and act if state or instance changes."""
        previous = self.health
        health = self.health = event(previous, time.monotonic(), *values, **named)
        died = health.state is State.DEAD and previous.state is not State.DEAD
        if died:
            self._counts["engine/deaths"] += 1
        if died or previous.instance not in (None, health.instance):
            self._abandon_requests()
            if self._verification is not None:
                self._verification.cancel()
                self._verification = None
        if health.state is previous.state:
            return
        routine = {previous.state, health.state} == _ROUTINE
        level = logging.DEBUG if routine else logging.WARNING if health.state in _BAD else logging.INFO
        reason = f" ({health.reason})" if health.state in _BAD and health.reason else ""
        log.log(level, "%s at %s: %s -> %s%s", self.name, self.url, previous.state, health.state, reason)
        if health.state in (State.STALE, State.SUSPECT):
            self._wake.set()
        self._on_change()

    async def close(self) -> None:
        tasks = [task for task in (self._monitor_task, self._verification) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)
        await self._client.close()

    def _connect(self) -> None:
        """Replace the client, because a client belongs to one server instance."""
        closing = asyncio.ensure_future(self._client.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._client = self._build(self._config, self.url)

    def _abandon_requests(self) -> None:
        self._epoch += 1
        self._lost.set()
        self._lost = asyncio.Event()

    async def _monitor(self) -> None:
        while True:
            if await self._check_health() and (policy := self._policy_to_verify()) is not None:
                self.apply(EngineHealth.verification_started)
                self._verification = asyncio.create_task(self._verify(self._client, policy))
            with contextlib.suppress(TimeoutError):  # wait_for may swallow a cancellation in Python 3.11
                async with asyncio.timeout(self._config.engine.health_interval_s):
                    await self._wake.wait()
            self._wake.clear()

    def _policy_to_verify(self) -> PublishedPolicy | None:
        """Return the published policy if its weights may be loaded or scored now."""
        policy, health = self.policy, self.health
        if policy is None or not health.may_verify(time.monotonic()):
            return None
        # Broadcast weights are in no directory. Only an instance that the publisher loaded may still have them. The
        # trainer notices if another instance is behind, and sends the weights again.
        loaded = (policy.confirmed.get(self.url), policy.version)
        return policy if policy.path is not None or (health.instance, health.version) == loaded else None

    async def _check_health(self) -> bool:
        """Check the engine once. Return False if registration or policy changed meanwhile."""
        service, policy = self._service, self.policy
        info, problem = None, ""
        try:
            info = await check_health(self._client, self._config)
        except EngineError as error:
            problem = str(error)
        if not self._registered:
            return False
        if service != self._service or policy is not self.policy:
            self._wake.set()
            return False  # the answer is from a replaced instance, or about another policy
        if info is None:
            self.apply(EngineHealth.check_failed, problem)
        elif info.updating_s is not None:
            self.apply(EngineHealth.answered_updating)
        else:
            if self.health.instance not in (None, info.instance):
                self._counts["engine/restarts"] += 1  # it restarted at the same address
                self._connect()
            self.apply(EngineHealth.answered, info.instance, info.version)
        return True

    async def _verify(self, client: Engine, policy: PublishedPolicy) -> None:
        """Load the published weights, regardless of the version that the engine reports, and call `check_weights`.

        Broadcast weights are not loaded: see `_policy_to_verify`.
        """

        async def load(engine: Engine) -> float:
            return 0.0 if policy.path is None else await engine.load_weights(Path(policy.path), policy.version)

        tokens = np.array(policy.probe_tokens, np.int32)
        fingerprint = self._config.weight_sync.fingerprint and policy.fingerprint is not None
        try:
            await self._check(client)
            instance = (await client.info()).instance
            confirmation = await load_and_measure(client, instance, load, tokens, fingerprint=fingerprint)
            # The trainer may be publishing the next policy, which is then measured instead.
            if confirmation.version == policy.version:
                check_weights(self._config, confirmation, policy)
        except EngineError as error:
            self._verification = None
            self.apply(EngineHealth.verification_failed, f"not admitted: {error}")
        else:
            self._verification = None
            self._counts["engine/caught_up"] += 1
            done = "still has" if policy.path is None else "loaded"
            log.info("%s %s policy %d and scores it as the trainer does", self.name, done, policy.version)
            self.apply(EngineHealth.verification_passed, confirmation.instance, confirmation.version)


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("the monitor of an engine ended", exc_info=task.exception())
