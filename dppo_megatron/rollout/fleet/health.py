"""Decide whether an engine may sample, as a pure state machine. `MonitoredEngine` passes it the clock and the events.

```
 starting ──answers──► stale ──pool loads and scores──► verifying ──passes──► serving ◄──► suspect
                         ▲ ◄───────────────another policy was published──────────┘ │ fails │
                         └──────────────answers again, after its quarantine─────── dead ◄──┘
```
An engine serves only while `engine_checks.check_weights` has verified that it has the published weights. Either the
publisher confirmed this instance for the published version, or the pool loaded and checked the weights. Broadcast
weights cannot be loaded again, so the pool then checks the weights in the instance that the publisher confirmed. The
version that an engine reports verifies nothing, and every death ends the verification.

`weight_sync.publisher.Publisher` explains why an update may be lost when an engine dies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dppo_megatron.common.retry import doubling_delay_s


class State(StrEnum):
    STARTING = "starting"  # has not answered at this address yet
    STALE = "stale"  # answers, but is not verified to have the published weights
    VERIFYING = "verifying"  # the published weights are being loaded and scored
    SERVING = "serving"
    SUSPECT = "suspect"  # was serving and did not answer: gets no new requests, but continues running requests
    DEAD = "dead"  # running requests are abandoned


@dataclass(frozen=True, slots=True)
class HealthRules:
    failures: int  # consecutive failed health checks, or failed requests, that make an engine dead
    quarantine_s: float  # wait after failed requests or a failed verification; doubles each time in a row
    longest_quarantine_s: float = 60.0
    publish_s: float = 600.0  # longest duration of a publish


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Tracks the state of an engine. Each event is a method that returns the next state; `now` is in seconds."""

    rules: HealthRules
    state: State = State.STARTING
    since: float = 0.0  # when `state` last changed
    reason: str = ""  # reason for the last failure
    instance: str | None = None  # instance that answered last
    version: int = -1  # version that this instance reported
    published: int | None = None  # version to serve
    confirmed: tuple[str, int] | None = None  # instance and version that the publisher verified
    verified: tuple[str, int] | None = None  # instance and version with which it was admitted
    outdated: bool = False  # whether a policy was published since the running verification began
    failed_checks: int = 0  # consecutive failures
    failed_requests: int = 0  # consecutive failures
    quarantines: int = 0  # consecutive quarantines, without an answered request in between
    quarantined_until: float = 0.0
    updating: bool = False  # whether it was updating at the last passed health check

    @property
    def alive(self) -> bool:
        """Return whether the engine can be expected to serve soon without a restart."""
        return self.state not in (State.STARTING, State.DEAD)

    def may_verify(self, now: float) -> bool:
        """Return whether to load the published weights into the engine now.

        False if the engine is updating, or has been ahead of the published version for at most `publish_s`: the trainer
        is publishing the next policy, and a load would undo that.
        """
        if self.state is not State.STALE or self.updating or self.published is None or now < self.quarantined_until:
            return False
        return self.version <= self.published or now - self.since > self.rules.publish_s

    def registered(self, now: float) -> EngineHealth:
        """Return the state after a registration at a new address, which means a new instance."""
        return EngineHealth(self.rules, since=now, published=self.published)

    def vanished(self, now: float) -> EngineHealth:
        """Return the state after the engine's registration was removed."""
        return self._die(now, "it is no longer registered", until=now)

    def policy_published(self, now: float, version: int, confirmed: str | None = None) -> EngineHealth:
        """Return the state after `version` was published; the publisher verified it in instance `confirmed`.

        After an engine came back, a version may be published again. Then every engine loaded the version again, so an
        engine that is not confirmed this time may have other weights.
        """
        verified = None if confirmed is None else (confirmed, version)
        health = replace(self, published=version, confirmed=verified)
        # Only the publisher loads a serving engine, so no other load can have followed the confirmed load.
        if self.state is State.SERVING and confirmed == self.instance:
            return replace(health, verified=verified)
        if self.state is State.VERIFYING:  # continues, and may load this version after the publisher did
            return replace(health, outdated=True, confirmed=None if version == self.published else verified)
        # A suspect must answer first.
        state = State.STALE if self.state is State.SERVING else self.state
        return health._to(now, state, verified=None)

    def answered(self, now: float, instance: str, version: int) -> EngineHealth:
        """Return the state after `instance` passed a health check and reported policy `version`.

        With policy 7 published and confirmed in instance "a", a stale engine becomes:

        | answer  | state   | because                                                                      |
        |---------|---------|------------------------------------------------------------------------------|
        | "a", 7  | serving | the publisher confirmed this instance for 7; `verified` becomes ("a", 7)     |
        | "a", 6  | stale   | it does not report the published version: the pool loads 7                   |
        | "b", 7  | stale   | it was restarted: the report of an unconfirmed instance verifies nothing     |

        A serving engine, verified as ("a", 7), that answers "a", 8 keeps serving: policy 8 reaches it before 8 is
        published. If it answers "a", 6 or as instance "b", it becomes stale.
        """
        health = replace(self, instance=instance, version=version, failed_checks=0, updating=False)
        if instance != self.instance:
            health = replace(health, verified=None)
        if not instance and self.state in (State.STARTING, State.SUSPECT):  # without names, a restart is possible
            health = replace(health, verified=None, confirmed=None)
        if self.state is State.DEAD:
            return health._to(now, State.STALE) if now >= self.quarantined_until else health
        if self.state is State.VERIFYING:  # the caller cancels the verification of another instance
            return health if instance == self.instance else health._to(now, State.STALE)
        claim, published = (instance, version), self.published
        if published is not None and version >= published and health.verified == (instance, published):
            return health._to(now, State.SERVING)
        if version == published and health.confirmed == claim and now >= self.quarantined_until:
            return health._to(now, State.SERVING, verified=claim)
        return health._to(now, State.STALE, verified=None)

    def answered_updating(self, now: float) -> EngineHealth:
        """Return the state after a health check during a weight update; later the engine reports the new version."""
        return replace(self, failed_checks=0, updating=True)

    def check_failed(self, now: float, reason: str) -> EngineHealth:
        """Return the state after a failed health check."""
        health = replace(self, failed_checks=self.failed_checks + 1, reason=reason)
        if self.state in (State.STARTING, State.DEAD):
            return health
        if health.failed_checks >= self.rules.failures:
            return health._die(now, reason, until=now)
        return health._to(now, State.SUSPECT) if self.state is State.SERVING else health

    def request_done(self, now: float) -> EngineHealth:
        """Return the state after a correct answer to a request."""
        return self if self.state is State.DEAD else replace(self, failed_requests=0, quarantines=0)

    def request_failed(self, now: float, reason: str) -> EngineHealth:
        """Return the state after a request failed, gave an invalid sample, or timed out while health checks failed."""
        if self.state is State.DEAD:
            return self
        health = replace(self, failed_requests=self.failed_requests + 1, reason=reason)
        if health.failed_requests >= self.rules.failures:
            return health._quarantine(now, reason)
        return health._to(now, State.SUSPECT) if self.state is State.SERVING else health

    def verification_started(self, now: float) -> EngineHealth:
        """Return the state after the pool began to load the published weights."""
        return self._to(now, State.VERIFYING, outdated=False) if self.may_verify(now) else self

    def verification_passed(self, now: float, instance: str, version: int) -> EngineHealth:
        """Return the state after `instance` passed the weight check for `version`."""
        if self.state is not State.VERIFYING:
            return self
        if self.outdated or instance != self.instance or version != self.published:
            return self._to(now, State.STALE)
        return self._to(now, State.SERVING, verified=(instance, version), failed_checks=0, failed_requests=0)

    def verification_failed(self, now: float, reason: str) -> EngineHealth:
        """Return the state after a failed load of the published weights, or a failed weight check."""
        return self._quarantine(now, reason) if self.state is State.VERIFYING else self

    def _quarantine(self, now: float, reason: str) -> EngineHealth:
        wait = doubling_delay_s(self.rules.quarantine_s, self.quarantines, self.rules.longest_quarantine_s)
        return replace(self._die(now, reason, until=now + wait), quarantines=self.quarantines + 1)

    def _die(self, now: float, reason: str, until: float) -> EngineHealth:
        until = max(until, self.quarantined_until)
        ended = {"confirmed": None, "verified": None, "failed_requests": 0, "quarantined_until": until}
        return self._to(now, State.DEAD, reason=reason, **ended)

    def _to(self, now: float, state: State, **changes: Any) -> EngineHealth:
        return replace(self, state=state, since=self.since if state is self.state else now, **changes)
