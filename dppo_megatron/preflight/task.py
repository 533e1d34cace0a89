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
from .node import Observed, gpu_names, gpu_rows, judge_gpu, look_at_files, look_at_limits

MARK = "preflight "
KEEPER = "rank-0"  # keeps the store at which all meet
STARTED, IMPORTED, LOOKED, READY, DONE = "started", "imported", "looked", "ready", "done"  # stages, in their order
COLUMNS = 1024  # numbers of each member in a collective


def silence_timeout_s(size: int) -> float:
    """The silence of `size` processes after which those that are behind count as lost."""
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


def run_place(config_file: Path, place: Place, address: Callable[[Config], str]) -> int:
    """Report every stage on standard output; 0 whatever is found. address: this process's own, as others reach it."""
    name = f"{'serving' if place.serves else 'rank'}-{place.rank}"

    def report(**facts: Any) -> None:
        line = json.dumps({"task": name, "node": place.node, **facts})
        sys.stdout.write(f"{MARK}{line}\n")  # at once: others write to the same log
        sys.stdout.flush()

    report(stage=STARTED, clock=time.time())
    try:
        config = load_config(config_file)
        _check(config, place, name, address(config), report)
    except Exception as error:
        report(error=_brief(error))
    return 0


def _check(config: Config, place: Place, name: str, address: str, report: Callable[..., None]) -> None:
    import torch
    import torch.distributed as dist

    report(stage=IMPORTED)
    host, port, token, serving = place.meeting.split(",")
    out, s, cuda = Observed(), config.slurm, torch.cuda.is_available()
    if s.serving_gpus_per_node if place.serves else s.gpus_per_node:
        if torch.version.cuda and not cuda:
            out.faults.append("torch sees no GPU")
        rows = gpu_rows(out)
        for gpu in range(place.gpu, len(gpu_names(rows)) if place.serves else place.gpu + bool(rows)):
            judge_gpu(out, rows, gpu, torch.version.cuda, trains=not place.serves)
        if place.serves and s.heterogeneous:  # its nodes are of another kind
            out.same.clear()
        report()  # a sign of life
    if place.serves or place.rank % place.per_node == 0:
        look_at_limits(out)
        look_at_files(out, config, token, f"{place.node}-{name}", trains=not place.serves)
    report(stage=LOOKED, **asdict(out))
    device = torch.device("cuda", place.gpu % torch.cuda.device_count()) if cuda else torch.device("cpu")
    keeps, size = name == KEEPER, config.parallel.world_size
    start = timedelta(seconds=s.start_timeout_s)  # until rank 0 is there; `watch` is sooner
    store = dist.TCPStore(host, int(port), is_master=keeps, wait_for_workers=False, timeout=start)
    report(stage=READY)

    def works(group: str, rank: int, members: int) -> bool:
        report(joins=group)
        try:
            wrong = _exchange(dist.PrefixStore(group, store), group == WEIGHTS, rank, members, device, address, size)
        except Exception as error:
            report(left=group, error=_brief(error))
            return False
        report(left=group, wrong=wrong)
        return True

    failed = False
    for group, members in ({} if place.serves else process_groups(config.parallel, place.per_node)).items():
        if place.rank in members and (not failed or PAIRS in group):  # both pairs of a node are tried
            failed |= not works(group, members.index(place.rank), len(members))
    if place.serves:  # until rank 0 is there
        store.wait([WEIGHTS], start)
    elif keeps and not failed:
        store.set(WEIGHTS, "")
    if config.weight_sync.transport == "broadcast" and (place.serves or (keeps and int(serving) and not failed)):
        failed = not works(WEIGHTS, place.serves * (1 + place.rank), 1 + int(serving))
    if not failed:
        report(stage=DONE)
        store.add(DONE, 1)
    while keeps and store.add(DONE, 0) < size + int(serving):  # the others need the store
        time.sleep(0.05)


def _exchange(store: Any, one: bool, rank: int, members: int, device: Any, address: str, size: int) -> list[int]:
    """All-reduce a row of each member or, for `one`, broadcast that of member 0. Return members with wrong rows."""
    import torch
    import torch.distributed as dist

    from dppo_megatron.weights.process_group import new_group

    timeout_s = 0.75 * silence_timeout_s(size)
    group = new_group(store, rank, members, "nccl" if device.type == "cuda" else "gloo", address, timeout_s)
    values = torch.zeros(1 if one else members, COLUMNS, device=device)
    values[rank : rank + 1] = rank + 1
    work = group.broadcast([values], dist.BroadcastOptions()) if one else group.allreduce([values])
    work.wait(timedelta(seconds=timeout_s))
    return wrong_rows(values)


def wrong_rows(values: Any) -> list[int]:
    """Return the rows of `values` [members, COLUMNS] that are not their own number, counted from 1."""
    return [row for row, found in enumerate(values.cpu()) if not bool((found == row + 1).all())]


def _brief(error: Exception) -> str:
    return bounded(f"{type(error).__name__}: {' '.join(str(error).splitlines()[:2])}", 300)
