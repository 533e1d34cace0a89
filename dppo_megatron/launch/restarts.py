"""Restarts an engine that ended, after growing delays and a limited number of times."""

from __future__ import annotations

from typing import Generic

from dppo_megatron.common.process import exit_reason
from dppo_megatron.common.retry import doubling_delay_s
from dppo_megatron.fleet.registry import forget
from dppo_megatron.run_dir import RunDir

from .launcher import Launcher, PlanT, ProcessT

ORPHANS_S = 1.0  # time for the orphans of a dead server to end by themselves
FIRST_S, LONGEST_S = 1.0, 60.0  # delays between the end of a server and its next start
HEALTHY_S = 300.0  # after serving for this long, the count of restarts begins again


class RestartedServer(Generic[PlanT, ProcessT]):
    """Starts one engine, and restarts it when it ends, at most `limit` times in a row.

    Call `check` often; it never blocks for long. The engine serves once it is registered in the run. Its registration
    is removed when it ends.
    """

    def __init__(self, launcher: Launcher[PlanT, ProcessT], plan: PlanT, run: RunDir, limit: int):
        self._launcher = launcher
        self._plan = plan
        self._run = run
        self._limit = limit
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
        name, code = self.process.name, self.process.poll()
        # An ended server is checked as well, because it may have registered and been killed between two calls.
        serves = self._serving_since is None and (self._run.services / f"{name}.json").exists()
        if serves:
            self._serving_since, self._ever_served = now, True
        if code is not None:
            return self._plan_restart(name, exit_reason(code), now)
        return f"{name} serves again" if serves and self._restarts else None

    def _plan_restart(self, name: str, reason: str, now: float) -> str | None:
        """Schedule the next start of the ended server, or set `failed`."""
        forget(self._run, name)
        self._launcher.end([self.process], ORPHANS_S)
        served_s = 0.0 if self._serving_since is None else now - self._serving_since
        self._restarts = 1 if served_s >= HEALTHY_S else self._restarts + 1
        self._serving_since = None
        if not self._ever_served:  # it is probably misconfigured, so a restart would not help
            self.failed = True
            return None
        if self._restarts > self._limit:
            self.failed = True
            return f"{name} is not started again after {self._limit} restarts in a row (engine.restarts)"
        delay = doubling_delay_s(FIRST_S, self._restarts - 1, LONGEST_S)
        self._due = now + delay
        return (
            f"{name} ended: {reason}. Restart {self._restarts} of {self._limit} (engine.restarts) in {delay:g} s; "
            f"see {self.process.log}"
        )
