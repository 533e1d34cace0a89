"""Has the ranks that export together wait for the one that takes the weights: at the store, and in no collective.

The source rank waits for its disk or for engines, which may take long. Ranks that waited for it in the gather of its
next weights would reach the time-out of a training collective (`parallel.timeout_s`), which ends the trainer.
"""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist

from dppo_megatron.common.ranks import Ranks

from .megatron_model import ShardGroup


class Turns:
    """To be called before every gather of an export, on all ranks of its group; returns once its rank 0 is there.

    Made on all of `ranks`, collectively; they say how long a wait may take. doing: of rank 0, for errors. Raises
    `RanksTimeout`.
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
        what = f"the weights that rank {members[0]} {self._doing}"
        self._ranks.after(members[0], f"{name}/{self._gathers[name]}", len(members) - 1, what)
