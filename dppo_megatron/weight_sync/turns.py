"""Has the ranks that export together wait for the one that sends: at the store, and in no collective.

A sender waits for engines, and an engine may take as long as `weight_sync.timeout_s`. Ranks that waited for the sender
in the gather of its next weights would reach the time-out of a training collective (`parallel.timeout_s`), which ends
the trainer.
"""

from __future__ import annotations

import time
from collections import Counter

import torch.distributed as dist

from dppo_megatron.hf.megatron_model import ShardGroup

from .errors import WeightSyncError

FIRST_POLL_S, LAST_POLL_S = 0.0002, 0.02


class Turns:
    """Call it before every gather of the export, on all ranks of its group: returns once the group's rank 0 is there.

    timeout_s: raises `WeightSyncError` after so long. One key of the store for each group.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._turn: Counter[str] = Counter()  # by the group's ranks
        self._store = None
        if dist.is_available() and dist.is_initialized():
            self._store = dist.PrefixStore("weight_sync_turns", dist.distributed_c10d._get_default_store())

    def __call__(self, group: ShardGroup) -> None:
        ranks = dist.get_process_group_ranks(group.group)
        key = "-".join(map(str, ranks))
        self._turn[key] += 1
        if group.rank == 0:
            self._store.set(key, str(self._turn[key]))
            return
        started, pause = time.monotonic(), FIRST_POLL_S
        # Not by the store's own waiting: other threads of torch share the connection, and would wait, too.
        while self._reached(key) < self._turn[key]:
            if time.monotonic() > started + self._timeout_s:
                raise WeightSyncError(
                    f"waited {self._timeout_s:g} s for trainer rank {ranks[0]} to send weights to engines; see its log"
                )
            time.sleep(pause)
            pause = min(2 * pause, LAST_POLL_S)

    def _reached(self, key: str) -> int:
        return int(self._store.get(key)) if self._store.check([key]) else 0
