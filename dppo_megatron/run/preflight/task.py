"""Runs a process's checks, as a trainer rank or on a serving node, and reports stages as JSON lines.

The command that started all processes reads the lines (`watch`). Missing lines show a process that hangs or that sees
no shared directory.
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

from dppo_megatron.config import Config
from dppo_megatron.errors import bounded
from dppo_megatron.run.checks import load_config

from .groups import KEEPER, PAIRS, WEIGHTS, checked_groups
from .node import Observed, look_at_files, look_at_gpus, look_at_limits

MARK = "preflight "
# The stages, in order. Each name describes the process's next action.
STARTING, STARTED = "starting", "importing torch"
IMPORTED, LOOKED = "looking at GPUs, the model, the data and run.dir", "waiting for the store of rank 0"
READY, DONE = "in the process groups", "done"
COLUMNS = 1024  # each member sends this many numbers in a collective


def silence_timeout_s(size: int) -> float:
    """Return after how many seconds of silence late processes count as lost, if there are `size` processes."""
    return 9.0 + size / 16


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Describes a process's position: trainer rank `rank`, or serving process number `rank`."""

    rank: int
    gpu: int  # index among its node's visible GPUs
    per_node: int  # trainer ranks per node
    node: str
    meeting: str  # HOST,PORT,SIZE: the store of rank 0 and the number of all processes
    serves: bool = False

    @property
    def name(self) -> str:
        return f"{'serving' if self.serves else 'rank'}-{self.rank}"


def run_place(config_file: Path, place: ProcessPlace, address: Callable[[Config], str]) -> int:
    """Report every stage on standard output; always return 0.

    address: returns this process's address, as other processes reach it.
    """

    def report(**facts: Any) -> None:
        line = json.dumps({"task": place.name, "node": place.node, **facts})
        sys.stdout.write(f"{MARK}{line}\n")  # one write, because other processes write to the same log
        sys.stdout.flush()

    report(stage=STARTED, clock=time.time())
    try:
        config = load_config(config_file)
        _check(config, place, address(config), report)
    except Exception as error:
        report(error=_brief(error))
    return 0


def _check(config: Config, place: ProcessPlace, address: str, report: Callable[..., None]) -> None:
    import torch
    import torch.distributed as dist

    report(stage=IMPORTED)
    host, port, size = place.meeting.split(",")
    out, s, cuda = Observed(), config.slurm, torch.cuda.is_available()
    if s.serving_gpus_per_node if place.serves else s.gpus_per_node:
        if torch.version.cuda and not cuda:
            out.faults.append("torch sees no GPU")
        look_at_gpus(out, place.gpu, torch.version.cuda, trains=not place.serves)
        if place.serves and s.heterogeneous:  # serving nodes may be of another kind
            out.same.clear()
        report()  # shows that the process is alive
    if place.serves or place.rank % place.per_node == 0:
        look_at_limits(out)
        look_at_files(out, config, port, f"{place.node}-{place.name}", trains=not place.serves)
    report(stage=LOOKED, **asdict(out))
    device = torch.device("cuda", place.gpu % torch.cuda.device_count()) if cuda else torch.device("cpu")
    start = timedelta(seconds=s.start_timeout_s)  # limit for rank 0 to start; `watch` ends the wait sooner
    store = dist.TCPStore(host, int(port), is_master=place.name == KEEPER, wait_for_workers=False, timeout=start)
    report(stage=READY)
    failed, timeout_s = False, 0.75 * silence_timeout_s(int(size))
    for group, members in checked_groups(config, place.per_node, int(size)).items():
        if place.name not in members or (failed and PAIRS not in group):  # both pairs of a node are tried
            continue
        if group == WEIGHTS and place.serves:
            store.wait([WEIGHTS], start)  # rank 0 first finishes its other groups
        elif group == WEIGHTS:
            store.set(WEIGHTS, "")
        report(joins=group)
        try:
            rank, group_store = members.index(place.name), dist.PrefixStore(group, store)
            report(left=group, wrong=_all_reduce(group_store, rank, len(members), device, address, timeout_s))
        except Exception as error:
            report(left=group, error=_brief(error))
            failed = True
    if not failed:
        report(stage=DONE)
        store.add(DONE, 1)
    while place.name == KEEPER and store.add(DONE, 0) < int(size):  # the other processes need the store
        time.sleep(0.05)


def _all_reduce(store: Any, rank: int, members: int, device: Any, address: str, timeout_s: float) -> list[int]:
    """Sum a row from each member over the group. Return the members with wrong rows."""
    import torch

    from dppo_megatron.weights.process_group import new_group

    group = new_group(store, rank, members, "nccl" if device.type == "cuda" else "gloo", address, timeout_s)
    values = torch.zeros(members, COLUMNS, device=device)
    values[rank] = rank + 1
    group.allreduce([values]).wait(timedelta(seconds=timeout_s))
    return wrong_rows(values)


def wrong_rows(values: Any) -> list[int]:
    """Return the indices of rows in `values` [members, COLUMNS] that differ from index + 1."""
    return [row for row, columns in enumerate(values.cpu()) if not bool((columns == row + 1).all())]


def _brief(error: Exception) -> str:
    return bounded(f"{type(error).__name__}: {' '.join(str(error).splitlines()[:2])}", 300)
