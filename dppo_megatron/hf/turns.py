"""Lets exporting ranks wait for the source rank, which receives the weights, in the store instead of a collective.

The source rank waits for its disk or for engines, which may take long. Ranks that waited for it in the gather of its
next weights would reach the time-out of a training collective (`parallel.timeout_s`), which terminates the trainer.
"""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist

from dppo_megatron.common.ranks import Ranks

from .megatron_model import ShardGroup


class Turns:
    """Blocks before each gather of an export until rank 0 of the group has arrived.

    Construct it collectively on all of `ranks`, which limits the time of a wait. Call it before every gather, on all
    ranks of the gather's group. `doing` describes rank 0's work in errors. Raises `RanksTimeout`.
    """

    def __init__(self, ranks: Ranks, doing: str):
        self._ranks = ranks
        self._doing = doing
        self._name = ranks.new_name()
        self._gathers: Counter[str] = Counter()

    def __call__(self, group: ShardGroup) -> None:
        members = dist.get_process_group_ranks(group.group)
        name = f"{self._name}/{'-'.join(map(str, members))}"
        self._gathers[name] += 1
        subject = f"the weights that rank {members[0]} {self._doing}"
        self._ranks.wait_for_leader(members[0], f"{name}/{self._gathers[name]}", len(members) - 1, subject)
