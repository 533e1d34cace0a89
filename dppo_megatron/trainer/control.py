"""What all ranks must agree on between steps: that the batch is there, or that it is time to stop."""

from __future__ import annotations

import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from dppo_megatron.errors import ExpectedError

from .batches import BatchSource

POLL_S = 0.005
GO, STOP, STALLED = 0, 1, 2


class StopRequested(Exception):
    """SIGTERM or SIGINT arrived; every rank raises it at the same place."""


class BatchTimeout(ExpectedError, TimeoutError):
    """No rollouts arrived in time."""


class Control:
    """Global rank 0 watches the bank and the signals and tells the others by one small gloo broadcast a step.

    Only one process of the job polls the file system, and a wait of any length never meets a NCCL time-out.
    A context manager: inside it SIGTERM and SIGINT are requests to stop, outside they end the process.
    """

    def __init__(self, stall_timeout_s: float):
        self._stall_timeout_s = stall_timeout_s
        self._stop = False
        self._handlers: dict[int, object] = {}
        self._group = None
        if dist.get_world_size() > 1:
            timeout = timedelta(seconds=stall_timeout_s + 120)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def __enter__(self) -> Control:
        self._handlers = {n: signal.signal(n, self._on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_exc: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def barrier(self) -> None:
        """Waits for every rank, for up to the stall time-out."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def wait_until_ready(self, source: BatchSource, step: int) -> None:
        """Returns when the batch of `step` can be read. One broadcast of one integer.

        Raises `StopRequested` on every rank when a signal asked for it, and `BatchTimeout` on every rank when
        nothing new arrived for `run.stall_timeout_s`.
        """
        decision = torch.zeros(1, dtype=torch.int64)
        if dist.get_rank() == 0:
            decision[0] = self._watch(source, step)
        if self._group is not None:
            dist.broadcast(decision, src=0, group=self._group)
        if decision == STOP:
            raise StopRequested
        if decision == STALLED:
            raise BatchTimeout(
                f"step {step}: nothing new arrived for {self._stall_timeout_s:.0f} s (run.stall_timeout_s), "
                f"{source.progress()}; see the orchestrator's log"
            )

    def _watch(self, source: BatchSource, step: int) -> int:
        last, since = source.progress(), time.monotonic()
        while not self._stop:
            if source.ready(step):
                return GO
            if (now := source.progress()) != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > self._stall_timeout_s:
                return STALLED
            time.sleep(POLL_S)
        return STOP

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stop = True
