"""Let all ranks agree between steps that the batch is available, or that training stops."""

from __future__ import annotations

import signal
import time
from typing import Any

from dppo_megatron.common.ranks import Ranks
from dppo_megatron.common.retry import look_again_s
from dppo_megatron.errors import ExpectedError
from dppo_megatron.train.weight_sync import Publisher

from .batches import BatchSource

LAG_S = 2.0  # between checks for restarted engines
ROUND_S = 60.0  # longest time that other ranks wait in one broadcast
GO, STOP, STALLED, LAG, WAIT = 0, 1, 2, 3, 4


class StopRequested(Exception):
    """SIGTERM or SIGINT arrived; every rank raises this at the same point in the loop."""


class BatchTimeout(ExpectedError, TimeoutError):
    """No rollouts arrived in time."""


class Control:
    """Makes global rank 0 watch the bank and signals, and broadcast a decision over gloo at least once a minute.

    Only one process in the job polls the file system, and no collective times out during a long wait. Use the class as
    a context manager: inside, SIGTERM and SIGINT request a stop; outside, they terminate the process.
    """

    def __init__(self, stall_timeout_s: float):
        self._stall_timeout_s = stall_timeout_s
        self._progress, self._since = "", 0.0  # rank 0: last rollout progress, and when it changed
        self._stop = False
        self._handlers: dict[int, Any] = {}  # previous signal handlers
        self._ranks = Ranks(timeout_s=stall_timeout_s + 120)

    def __enter__(self) -> Control:
        self._handlers = {n: signal.signal(n, self._on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_exc: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def barrier(self) -> None:
        """Return when every rank has called this; rank 0 may wait for engines longer than a collective may take."""
        self._ranks.barrier("rank 0, which waits for the engines")

    def wait_until_ready(self, source: BatchSource, step: int, publisher: Publisher | None = None) -> bool:
        """Wait for the batch of `step`; return False if an engine needs the policy before it can sample. Collective.

        Returns True when the batch can be read. Raises `StopRequested` on every rank when a signal requested it, and
        `BatchTimeout` on every rank when nothing new arrived for `run.stall_timeout_s`.
        """
        decision = WAIT
        self._progress, self._since = source.progress(), time.monotonic()
        while decision == WAIT:
            decision = self._ranks.from_rank_zero(
                lambda: self._watch(source, step, publisher), f"rank 0, which waits for the batch of step {step}"
            )
        if decision == STOP:
            raise StopRequested
        if decision == STALLED:
            raise BatchTimeout(
                f"step {step}: nothing new arrived for {self._stall_timeout_s:.0f} s (run.stall_timeout_s), "
                f"{source.progress()}; see the orchestrator's log"
            )
        return decision != LAG

    def _watch(self, source: BatchSource, step: int, publisher: Publisher | None) -> int:
        start = time.monotonic()
        next_check, deadline = start + LAG_S, start + ROUND_S
        while not self._stop:
            if source.ready(step):
                return GO
            if (progress := source.progress()) != self._progress:
                self._progress, self._since = progress, time.monotonic()
            if time.monotonic() - self._since > self._stall_timeout_s:
                return STALLED
            if time.monotonic() > deadline:
                return WAIT
            if publisher is not None and time.monotonic() > next_check:
                if publisher.engines_lag():
                    return LAG
                next_check = time.monotonic() + LAG_S
            time.sleep(look_again_s(time.monotonic() - start))
        return STOP

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stop = True
