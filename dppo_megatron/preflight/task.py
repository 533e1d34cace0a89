"""One process at the place of a trainer rank, or on a node that serves: it reports stages as lines of JSON.

The command that started all of them reads the lines (`watch`), so a process that hangs or that sees no shared directory
is found: it is the one whose lines are missing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from dppo_megatron.checks import load_config
from dppo_megatron.config import Config
from dppo_megatron.errors import bounded

from .groups import PAIRS, WEIGHTS, process_groups
from .node import Observed, look_at_files, look_at_gpu, look_at_limits

MARK = "preflight "
KEEPER = "rank-0"  # keeps the store at which all meet
STARTED, IMPORTED, LOOKED, READY, DONE = STAGES = ("started", "imported", "looked", "ready", "done")
COLUMNS = 1024  # numbers of each member in a collective


def patience_s(size: int) -> float:
    """The silence of all processes after which those that are behind count as lost."""
    return 9.0 + size / 16


@dataclass(frozen=True, slots=True)
class Place:
    """Trainer rank `rank`, or number `rank` of the processes that serve."""

    rank: int
    gpu: int  # of those that its node shows
    per_node: int  # trainer ranks
    node: str
    meeting: str  # HOST,PORT,TOKEN,SERVING: store of rank 0, name of the file in the run directory, serving processes
    serves: bool = False

    @property
    def name(self) -> str:
        return f"{'serving' if self.serves else 'rank'}-{self.rank}"


def run_place(config_file: Path, place: Place, address: Callable[[Config], str]) -> int:
    """Report every stage on standard output. Exit code 0 whatever is found: one that fails must not end the others.

    address: this process's own, as the others reach it.
    """

    def report(**facts: Any) -> None:
        line = json.dumps({"task": place.name, "node": place.node, **facts})
        sys.stdout.write(f"{MARK}{line}\n")  # at once: others write to the same log
        sys.stdout.flush()

    report(stage=STARTED, clock=time.time())
    try:
        config = load_config(config_file)
        _check(config, place, address(config), report)
    except Exception as error:
        report(error=_brief(error))
    return 0


def _check(config: Config, place: Place, address: str, report: Any) -> None:
    import torch
    import torch.distributed as dist

    report(stage=IMPORTED)
    host, port, token, serving = place.meeting.split(",")
    out, s, cuda = Observed(), config.slurm, torch.cuda.is_available()
    if s.serving_gpus_per_node if place.serves else s.gpus_per_node:
        look_at_gpu(out, place.gpu, cuda=torch.version.cuda, sees=cuda, trains=not place.serves)
        report()  # a sign of life
    if place.serves or place.rank % place.per_node == 0:
        look_at_limits(out)
        look_at_files(out, config, token, f"{place.node}-{place.name}", trains=not place.serves)
    report(stage=LOOKED, **asdict(out))
    device = torch.device("cuda", place.gpu % torch.cuda.device_count()) if cuda else torch.device("cpu")
    keeps, size, timeout_s = (
        place.name == KEEPER,
        config.parallel.world_size,
        0.75 * patience_s(config.parallel.world_size),
    )
    start = timedelta(seconds=s.start_timeout_s)  # until rank 0 is there; `watch` is sooner
    store = dist.TCPStore(host, int(port), is_master=keeps, wait_for_workers=False, timeout=start)
    report(stage=READY)

    def worked(group: str, rank: int, size: int) -> bool:
        report(joins=group)
        try:
            mine = dist.PrefixStore(group, store)
            report(left=group, wrong=_exchange(mine, group == WEIGHTS, rank, size, device, address, timeout_s))
        except Exception as error:
            report(left=group, error=_brief(error))
            return False
        return True

    failed = False
    for group, members in ({} if place.serves else process_groups(config.parallel, place.per_node)).items():
        if place.rank in members and (not failed or PAIRS in group):  # both pairs of a node are tried
            failed |= not worked(group, members.index(place.rank), len(members))
    if place.serves:  # until rank 0 is there
        store.wait([WEIGHTS], start)
    elif keeps and not failed:
        store.set(WEIGHTS, "")
    if place.serves or (keeps and int(serving) and not failed):
        failed = not worked(WEIGHTS, place.serves * (1 + place.rank), 1 + int(serving))
    if not failed:
        report(stage=DONE)
        store.add(DONE, 1)
    while keeps and store.add(DONE, 0) < size + int(serving):  # the store is its own
        time.sleep(0.05)


def _exchange(store: Any, one: bool, rank: int, size: int, device: Any, address: str, timeout_s: float) -> list[int]:
    """All-reduce a row of each member or, for `one`, broadcast that of member 0. Return members with wrong rows."""
    import torch
    import torch.distributed as dist

    from dppo_megatron.weights.process_group import new_group

    group = new_group(store, rank, size, "nccl" if device.type == "cuda" else "gloo", address, timeout_s)
    values = torch.zeros(1 if one else size, COLUMNS, device=device)
    values[rank : rank + 1] = rank + 1
    work = group.broadcast([values], dist.BroadcastOptions()) if one else group.allreduce([values])
    work.wait(timedelta(seconds=timeout_s))
    return wrong_rows(values)


def wrong_rows(values: Any) -> list[int]:
    """Return the rows of `values` [members, COLUMNS] that are not their own number, counted from 1."""
    return [row for row, found in enumerate(values.cpu()) if not bool((found == row + 1).all())]


def _brief(error: Exception) -> str:
    return bounded(f"{type(error).__name__}: {' '.join(str(error).splitlines()[:2])}", 300)
