"""Whether an engine may sample: a pure state machine. No clock, no network; the pool feeds it and acts on its state.

```
 starting ──answers──► stale ──pool loads and scores──► verifying ──right──► serving ◄──► suspect
                         ▲ ◄───────────────another policy was published────────┘  │ fails │
                         └──────────────answers again, after its quarantine────── dead ◄──┘
```
An engine serves only while its weights are verified to be those of the published policy: the publisher confirmed this
instance of it for that version, or the pool compared log-probs after it loaded them (of weights that were broadcast:
after it found the confirmed instance and version again). The version that an engine reports verifies nothing, and
every death ends the verification.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from dppo_megatron.common.retry import doubling_delay_s


class State(StrEnum):
    STARTING = "starting"  # has not answered at this address yet
    STALE = "stale"  # answers, but its weights are not verified to be the published ones
    VERIFYING = "verifying"  # the published weights are being loaded and scored
    SERVING = "serving"
    SUSPECT = "suspect"  # was serving and did not answer: gets no new requests, keeps those it has
    DEAD = "dead"  # its requests are given up


@dataclass(frozen=True, slots=True)
class Registered:
    """It is registered at a new address: a new instance, whatever it reports."""


@dataclass(frozen=True, slots=True)
class Vanished:
    """It is no longer registered."""


@dataclass(frozen=True, slots=True)
class Answered:
    """This instance of the server passed a health check and reports that it serves this policy version."""

    instance: str
    version: int


@dataclass(frozen=True, slots=True)
class Updating:
    """It passed a health check, and somebody is replacing its weights at this moment: it does nothing else."""


@dataclass(frozen=True, slots=True)
class Silent:
    """A health check failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """A request was answered as it should be."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A request failed, came back invalid, or timed out while health checks failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Published:
    """Policy `version` is the one to serve; the publisher verified it in the instance `confirmed`."""

    version: int
    confirmed: str | None = None


@dataclass(frozen=True, slots=True)
class VerifyStarted:
    """The pool began to load the published weights into it."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Under `version`, this instance of the server passed the weight check: it scores as the trainer does."""

    instance: str
    version: int


@dataclass(frozen=True, slots=True)
class VerifyFailed:
    """It could not be loaded, or did not pass the weight check."""

    reason: str


Event = (
    Registered
    | Vanished
    | Answered
    | Updating
    | Silent
    | Delivered
    | Failed
    | Published
    | VerifyStarted
    | Verified
    | VerifyFailed
)


@dataclass(frozen=True, slots=True)
class HealthRules:
    failures: int  # in a row, of health checks or of requests, that make an engine dead
    quarantine_s: float  # after a death by failed requests or a failed verification; doubles with each in a row
    longest_quarantine_s: float = 60.0
    publish_s: float = 600.0  # no publish takes longer


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`advance` gives the next one; nothing else changes it."""

    state: State = State.STARTING
    since: float = 0.0  # when it came into `state`, seconds of the caller's clock
    reason: str = ""  # of the last failure
    instance: str | None = None  # that answered last
    version: int = -1  # that it reported
    published: int | None = None  # version to serve
    confirmed: tuple[str, int] | None = None  # instance and version that the publisher verified
    verified: tuple[str, int] | None = None  # instance and version it was admitted with
    silent: int = 0  # failed health checks in a row
    failed: int = 0  # failed requests in a row
    quarantines: int = 0  # in a row, without a request answered between them
    quarantined_until: float = 0.0
    updating: bool = False  # as of the last health check that it passed

    @property
    def alive(self) -> bool:
        """Whether it can be expected to serve soon without being restarted."""
        return self.state not in (State.STARTING, State.DEAD)

    def may_verify(self, now: float, rules: HealthRules) -> bool:
        """Whether to load the published weights into it now.

        Not while it is ahead of them or being updated: the trainer is publishing the next policy to it, which must not
        be undone.
        """
        if self.state is not State.STALE or self.updating or self.published is None or now < self.quarantined_until:
            return False
        return self.version <= self.published or now - self.since > rules.publish_s

    def advance(self, event: Event, now: float, rules: HealthRules) -> EngineHealth:
        after = self._next(event, now, rules)
        return after if after.state is self.state else replace(after, since=now)

    def _next(self, event: Event, now: float, rules: HealthRules) -> EngineHealth:
        match event:
            case Registered():
                return EngineHealth(since=now, published=self.published)
            case Vanished():
                return self._die("it is no longer registered", until=now)
            case Published(version, confirmed):
                return self._on_published(version, confirmed)
            case Answered(instance, version):
                return replace(self, updating=False)._on_answered(instance, version, now)
            case Updating():  # alive; what it serves will be known when it is done
                return replace(self, silent=0, updating=True)
            case Silent(reason):
                return self._on_silent(reason, now, rules)
            case Delivered():
                return self if self.state is State.DEAD else replace(self, failed=0, quarantines=0)
            case Failed(reason):
                return self._on_failed(reason, now, rules)
            case VerifyStarted():
                return replace(self, state=State.VERIFYING) if self.may_verify(now, rules) else self
            case Verified(instance, version):
                return self._on_verified(instance, version)
            case VerifyFailed(reason):
                return self._quarantine(reason, now, rules) if self.state is State.VERIFYING else self

    def _on_published(self, version: int, confirmed: str | None) -> EngineHealth:
        verified = None if confirmed is None else (confirmed, version)
        if version == self.published:
            return replace(self, confirmed=verified)
        after = replace(self, published=version, confirmed=verified)
        # Only the publisher loads a serving engine, so nothing can have come after what it confirmed.
        if self.state is State.SERVING and confirmed == self.instance:
            return replace(after, verified=verified)
        # A suspect must answer first; a verification goes on, and its result is judged by the new version.
        state = State.STALE if self.state is State.SERVING else self.state
        return replace(after, state=state, verified=None)

    def _on_answered(self, instance: str, version: int, now: float) -> EngineHealth:
        seen = replace(self, instance=instance, version=version, silent=0)
        if instance != self.instance:
            seen = replace(seen, verified=None)
        if not instance and self.state is State.SUSPECT:  # whether it was restarted meanwhile is unknown
            seen = replace(seen, verified=None, confirmed=None)
        if self.state is State.DEAD:
            return replace(seen, state=State.STALE) if now >= self.quarantined_until else seen
        if self.state is State.VERIFYING:  # of another instance: whoever verifies gave up
            return seen if instance == self.instance else replace(seen, state=State.STALE)
        claim, published = (instance, version), self.published
        # It may be ahead: the next policy reaches an engine before it is published.
        if seen.verified == (instance, published) and version >= published:
            return replace(seen, state=State.SERVING)
        if version == published and seen.confirmed == claim and now >= self.quarantined_until:
            return replace(seen, state=State.SERVING, verified=claim)
        return replace(seen, state=State.STALE, verified=None)

    def _on_silent(self, reason: str, now: float, rules: HealthRules) -> EngineHealth:
        seen = replace(self, silent=self.silent + 1, reason=reason)
        if self.state in (State.STARTING, State.DEAD):
            return seen
        if seen.silent >= rules.failures:
            return seen._die(reason, until=now)
        return replace(seen, state=State.SUSPECT) if self.state is State.SERVING else seen

    def _on_failed(self, reason: str, now: float, rules: HealthRules) -> EngineHealth:
        if self.state is State.DEAD:
            return self
        seen = replace(self, failed=self.failed + 1, reason=reason)
        if seen.failed >= rules.failures:
            return seen._quarantine(reason, now, rules)
        return replace(seen, state=State.SUSPECT) if self.state is State.SERVING else seen

    def _on_verified(self, instance: str, version: int) -> EngineHealth:
        if self.state is not State.VERIFYING:
            return self
        if instance != self.instance or version != self.published:
            return replace(self, state=State.STALE)
        return replace(self, state=State.SERVING, verified=(instance, version), silent=0, failed=0)

    def _quarantine(self, reason: str, now: float, rules: HealthRules) -> EngineHealth:
        wait = doubling_delay_s(rules.quarantine_s, self.quarantines, rules.longest_quarantine_s)
        return replace(self._die(reason, until=now + wait), quarantines=self.quarantines + 1)

    def _die(self, reason: str, until: float) -> EngineHealth:
        return replace(
            self,
            state=State.DEAD,
            reason=reason,
            confirmed=None,
            verified=None,
            failed=0,
            quarantined_until=max(until, self.quarantined_until),
        )
