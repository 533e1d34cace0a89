"""Restarts of a server that ended: after growing delays, and only so often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from dppo_megatron.common.process import exit_reason
from dppo_megatron.common.retry import doubling_delay_s

from .launcher import Launcher, PlanT, ProcessT

ORPHANS_S = 1.0  # for the processes that a dead server left behind to end by themselves


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
        return doubling_delay_s(self.first_s, number - 1, self.longest_s)


class RestartedServer(Generic[PlanT, ProcessT]):
    """Starts one server, and again when it ends. `check` must be called often; it never blocks for long.

    `withdraw` removes the registration of one that ended; `is_registered` is true once it serves.
    """

    def __init__(
        self,
        launcher: Launcher[PlanT, ProcessT],
        plan: PlanT,
        *,
        withdraw: Callable[[], None],
        is_registered: Callable[[], bool],
        policy: RestartPolicy,
    ):
        self._launcher = launcher
        self._plan = plan
        self._withdraw = withdraw
        self._is_registered = is_registered
        self._policy = policy
        self._restarts = 0  # in a row
        self._serving_since: float | None = None
        self._ever_served = False
        self._due: float | None = None  # when to start it again
        self.process = launcher.start(plan)
        self.failed = False  # it ended and is not started again

    def check(self, now: float) -> str | None:
        """What happened to it since the last call, as a line for people, or None. Sets `failed` when the run cannot
        go on with it."""
        if self._due is not None:
            if now >= self._due:
                self._due, self.process = None, self._launcher.start(self._plan)
            return None
        code = self.process.poll()
        # Asked of one that ended, too: it may have served, and been killed, between two calls.
        serves = self._serving_since is None and self._is_registered()
        if serves:
            self._serving_since, self._ever_served = now, True
        if code is not None:
            return self._plan_restart(exit_reason(code), now)
        return f"{self._plan.name} serves again" if serves and self._restarts else None

    def _plan_restart(self, reason: str, now: float) -> str | None:
        """After it ended; or sets `failed`."""
        self._withdraw()
        self._launcher.end([self.process], ORPHANS_S)
        served_s = 0.0 if self._serving_since is None else now - self._serving_since
        self._restarts = self._policy.in_a_row(self._restarts, served_s)
        self._serving_since = None
        if not self._ever_served:  # misconfigured, not unlucky
            self.failed = True
            return None
        name, limit = self._plan.name, self._policy.limit
        if self._restarts > limit:
            self.failed = True
            return f"{name} is not started again after {limit} restarts in a row (engine.restarts)"
        delay = self._policy.delay_s(self._restarts)
        self._due = now + delay
        return (
            f"{name} ended: {reason}. Restart {self._restarts} of {limit} (engine.restarts) in {delay:g} s; "
            f"see {self.process.log}"
        )
