"""A server that is started again when it ends: with growing delays, and not for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dppo_megatron.common.process import Child, exit_reason

ORPHANS_S = 1.0  # for what a dead server left of its session to end by itself


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays between the end of a server and its next start, in seconds. Pure: time comes as an argument."""

    limit: int  # restarts in a row
    first_s: float = 1.0
    longest_s: float = 60.0
    healthy_s: float = 300.0  # a server that served so long ends for a new reason: counting begins anew

    def in_a_row(self, before: int, served_s: float) -> int:
        """Number of the restart that is due, when `before` came just before it and the server served since."""
        return 1 if served_s >= self.healthy_s else before + 1

    def delay_s(self, number: int) -> float:
        return min(self.first_s * 2 ** (number - 1), self.longest_s)


class RestartedServer:
    """Keeps one server running. `check` must be called often; it never blocks for long.

    `start` starts it, `withdraw` takes back the announcement of one that ended, `serves` says whether it is announced.
    """

    def __init__(
        self,
        start: Callable[[], Child],
        withdraw: Callable[[], None],
        serves: Callable[[], bool],
        policy: RestartPolicy,
    ):
        self._start = start
        self._withdraw = withdraw
        self._serves = serves
        self._policy = policy
        self._restarts = 0  # in a row
        self._serving_since: float | None = None
        self._ever_served = False
        self._due: float | None = None  # when to start it again
        self.child = start()
        self.failed = False  # it ended and is not started again

    def check(self, now: float) -> str | None:
        """What has happened to it, in words; None mostly. Sets `failed` when the run cannot go on with it."""
        if self._due is not None:
            if now >= self._due:
                self._due, self.child = None, self._start()
            return None
        code = self.child.poll()
        if code is not None:
            return self._ended(exit_reason(code), now)
        if self._serving_since is None and self._serves():
            self._serving_since, self._ever_served = now, True
            return f"{self.child.name} serves again" if self._restarts else None
        return None

    def end(self, grace_s: float) -> None:
        self._due = None
        self.child.end(grace_s)

    def _ended(self, reason: str, now: float) -> str | None:
        self._withdraw()
        self.child.end(ORPHANS_S)
        served_s = 0.0 if self._serving_since is None else now - self._serving_since
        self._restarts = self._policy.in_a_row(self._restarts, served_s)
        self._serving_since = None
        if not self._ever_served:  # misconfigured, not unlucky
            self.failed = True
            return None
        if self._restarts > self._policy.limit:
            self.failed = True
            return (
                f"{self.child.name} is not started again after {self._policy.limit} restarts in a row (engine.restarts)"
            )
        delay = self._policy.delay_s(self._restarts)
        self._due = now + delay
        return (
            f"{self.child.name} ended: {reason}. Restart {self._restarts} of {self._policy.limit} (engine.restarts) in "
            f"{delay:g} s; see {self.child.log}"
        )
