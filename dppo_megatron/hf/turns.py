"""Makes exporting ranks wait in the store, not in a collective, for the source rank that receives the weights.

The source rank waits for a disk or for engines, which may take long. If the other ranks waited in the next gather, they
would reach the training collective timeout (`parallel.timeout_s`), which terminates the trainer.
"""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist

from dppo_megatron.common.ranks import Ranks

from .megatron_model import ShardGroup


class Turns:
    """Blocks before each export gather until rank 0 in the group has arrived.

    Construct it collectively on all `ranks`; their timeout limits each wait. Call it before every gather, on all ranks
    in the gather's group. `doing` describes rank 0's work in errors. Raises `RanksTimeout`.
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
