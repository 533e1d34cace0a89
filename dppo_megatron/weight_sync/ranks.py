"""Small agreements between trainer ranks, apart from the groups that training uses."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from .errors import WeightSyncError

T = TypeVar("T")


class Ranks:
    """Objects between all trainer ranks over gloo, with a time-out of their own: engines may take longer than a
    collective of training may. Every method is collective."""

    def __init__(self, timeout_s: float):
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._group = None
        if self.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, on every rank. A `WeightSyncError` of it is raised on all."""
        outcome: list = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = make()
            except WeightSyncError as error:
                outcome[1] = str(error)
        if self._group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise WeightSyncError(outcome[1])
        return outcome[0]

    def gather(self, mine: T) -> list[T]:
        """Every rank's object, in rank order, on every rank."""
        if self._group is None:
            return [mine]
        everyone: list = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self._group)
        return everyone
