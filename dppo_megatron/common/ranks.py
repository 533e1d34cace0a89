"""Small agreements between the ranks of torch.distributed: one acts for all or all act, and an error is raised on all.

An error on one rank alone would leave the others in their next collective until its time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from dppo_megatron.errors import ExpectedError

T = TypeVar("T")


class RanksTimeout(ExpectedError, TimeoutError):
    """Another rank ended or was too late."""


class Ranks:
    """All ranks of the default process group, or this process alone where torch.distributed has not started.

    timeout_s: the longest wait for the others, over a gloo group of its own, which all ranks make here. None: the
    default group with its time-out. Every method is collective and moves pickled objects; `what` says in errors what
    the ranks were waiting for. Each raises `RanksTimeout` where another rank is gone or too late.
    """

    def __init__(self, timeout_s: float | None = None):
        started = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if started else 0
        self.size = dist.get_world_size() if started else 1
        self._limit = "" if timeout_s is None else f" {timeout_s:g} s"
        self._group = None
        if timeout_s is not None and self.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def from_rank_zero(self, make: Callable[[], T], what: str) -> T:
        """What `make` returns on rank 0, on every rank. Its error is raised on every rank, with its type and text."""
        if self.size == 1:
            return make()
        result = error = None
        if self.rank == 0:
            try:
                result = make()
            except Exception as raised:
                error = raised
        box = [result, error and _Failure(type(error), str(error))]
        with self._waiting_for(what):
            dist.broadcast_object_list(box, src=0, group=self._group)
        if error is not None:
            raise error
        if box[1] is not None:
            raise _error_of(*box[1])
        return box[0]

    def on_every_rank(self, act: Callable[[], T], what: str) -> list[T]:
        """Runs `act` on every rank and returns all results in rank order.

        When it raises on any, every rank raises an error of the type of the first, with the reasons of all.
        """
        result = error = None
        try:
            result = act()
        except Exception as raised:
            error = raised
        outcomes = self.gather((result, error and _Failure(type(error), str(error))), what)
        failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}
        if failures:
            kinds = [failure.kind for failure in failures.values()]
            reasons = [f"rank {rank}: {kind.__name__}: {text}" for rank, (kind, text) in failures.items()]
            raise _error_of(kinds[0], "\n".join(reasons)) from error
        return [result for result, _ in outcomes]

    def gather(self, mine: T, what: str) -> list[T]:
        """Every rank's object, in rank order, on every rank."""
        if self.size == 1:
            return [mine]
        everyone: list = [None] * self.size
        with self._waiting_for(what):
            dist.all_gather_object(everyone, mine, group=self._group)
        return everyone

    def barrier(self, what: str) -> None:
        """Returns when every rank has called it."""
        if self.size > 1:
            with self._waiting_for(what):
                dist.barrier(group=self._group)

    @contextmanager
    def _waiting_for(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what torch raises for a time-out and for a lost connection alike
            raise RanksTimeout(
                f"rank {self.rank} waited{self._limit} for {what}: another rank ended or was too late; see the logs of "
                f"all ranks ({str(error).splitlines()[0]})"
            ) from error


class _Failure(NamedTuple):
    kind: type[Exception]
    text: str


def _error_of(kind: type[Exception], text: str) -> Exception:
    """An error of another rank: of its type, but without the attributes that its constructor may set."""
    error = kind.__new__(kind)
    error.args = (text,)
    return error
