"""Restarts a server that ended, after growing delays and a limited number of times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from dppo_megatron.common.process import exit_reason
from dppo_megatron.common.retry import doubling_delay_s

from .launcher import Launcher, PlanT, ProcessT

ORPHANS_S = 1.0  # time for the orphans of a dead server to end by themselves


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Defines the delays between the end of a server and its next start, in seconds."""

    limit: int  # consecutive restarts
    first_s: float = 1.0
    longest_s: float = 60.0
    healthy_s: float = 300.0  # after serving for this long, the count of restarts begins again


class RestartedServer(Generic[PlanT, ProcessT]):
    """Starts one server, and restarts it when it ends. Call `check` often; it never blocks for long.

    `withdraw` removes the registration of an ended server; `is_registered` is true once it serves.
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
        self._restarts = 0  # consecutive restarts
        self._serving_since: float | None = None
        self._ever_served = False
        self._due: float | None = None  # time of its next start
        self.process = launcher.start(plan)
        self.failed = False  # it ended and is not started again

    def check(self, now: float) -> str | None:
        """Return a line for the log about the events since the last call, or None.

        Sets `failed` when the run cannot continue with this server.
        """
        if self._due is not None:
            if now >= self._due:
                self._due, self.process = None, self._launcher.start(self._plan)
            return None
        code = self.process.poll()
        # An ended server is checked as well, because it may have registered and been killed between two calls.
        serves = self._serving_since is None and self._is_registered()
        if serves:
            self._serving_since, self._ever_served = now, True
        if code is not None:
            return self._plan_restart(exit_reason(code), now)
        return f"{self._plan.name} serves again" if serves and self._restarts else None

    def _plan_restart(self, reason: str, now: float) -> str | None:
        """Schedule the next start of the ended server, or set `failed`."""
        self._withdraw()
        self._launcher.end([self.process], ORPHANS_S)
        served_s = 0.0 if self._serving_since is None else now - self._serving_since
        self._restarts = 1 if served_s >= self._policy.healthy_s else self._restarts + 1
        self._serving_since = None
        if not self._ever_served:  # it is probably misconfigured, so a restart would not help
            self.failed = True
            return None
        name, policy = self._plan.name, self._policy
        if self._restarts > policy.limit:
            self.failed = True
            return f"{name} is not started again after {policy.limit} restarts in a row (engine.restarts)"
        delay = doubling_delay_s(policy.first_s, self._restarts - 1, policy.longest_s)
        self._due = now + delay
        return (
            f"{name} ended: {reason}. Restart {self._restarts} of {policy.limit} (engine.restarts) in {delay:g} s; "
            f"see {self.process.log}"
        )
