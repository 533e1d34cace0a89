"""Binds tasks to whole cores on their GPUs' NUMA node, so that no two GPUs share a core."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence, Set
from pathlib import Path

from dppo_megatron.run.launch.rank_environment import nvidia_smi

SYS = Path("/sys")


def bind_to_gpus(name: str, first: int, count: int, tasks: int) -> bool:
    """Bind this process and later children to the CPUs of `count` visible GPUs, and print the binding.

    Returns False without binding if GPUs or CPUs cannot be read, or if fewer GPUs are visible than the step has `tasks`
    on this node. In the second case, a task does not see the other tasks' GPUs and cannot split the CPUs among all.
    """
    gpus = visible_gpus()
    shares = cpus_for(gpus, os.sched_getaffinity(0)) if len(gpus) >= max(tasks, first + count) else None
    if shares is None:
        return False
    bound_gpus, cpus = gpus[first : first + count], set().union(*shares[first : first + count])
    os.sched_setaffinity(0, cpus)
    print(f"{name} on {socket.gethostname()}: GPU {', '.join(bound_gpus)}, CPUs {sorted(cpus)}", flush=True)
    return True


def visible_gpus() -> list[str]:
    """Return the PCI addresses, as /sys writes them, of all GPUs that this task may use, in CUDA's order.

    Returns an empty list if the GPUs are unknown.
    """
    try:
        rows = nvidia_smi("index,uuid,pci.bus_id")
    except (OSError, subprocess.SubprocessError):
        return []
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    visible_rows = (
        [row for name in names for row in rows if name == row[0] or row[1].startswith(name)] if names else rows
    )
    return [row[2].lower()[-len("0000:17:00.0") :] for row in visible_rows]


def cpus_for(gpus: Sequence[str], allowed: Set[int], sys: Path = SYS) -> list[set[int]] | None:
    """Return the CPUs for each GPU. GPUs on a NUMA node split the node's `allowed` CPUs by whole cores.

    Example: a NUMA node has 2 GPUs and 4 cores with CPUs (0, 4), (1, 5), (2, 6), (3, 7). The GPUs get {0, 1, 4, 5} and
    {2, 3, 6, 7}. Returns None if a GPU would get no CPU.
    """
    near = [_cores(gpu, allowed, sys) for gpu in gpus]
    shares = []
    for index, cores in enumerate(near):
        place, count = near[:index].count(cores), near.count(cores)
        gpu_cores = cores[place * len(cores) // count : (place + 1) * len(cores) // count]
        shares.append({cpu for core in gpu_cores for cpu in core})
    return shares if all(shares) else None


def _cores(gpu: str, allowed: Set[int], sys: Path) -> list[tuple[int, ...]]:
    """Return the hyper-threads in `allowed` for each core near the GPU."""
    cpus = _cpulist(sys / "bus/pci/devices" / gpu / "local_cpulist") & allowed
    threads = {cpu: _cpulist(sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus}
    return sorted({tuple(sorted(threads[cpu] & cpus | {cpu})) for cpu in cpus})


def _cpulist(path: Path) -> set[int]:
    """Parse a list such as `0-3,8` in a file; return an empty set if the file cannot be read."""
    try:
        ranges = [part.split("-") for part in path.read_text().strip().split(",") if part]
    except OSError:
        return set()
    return {cpu for bounds in ranges for cpu in range(int(bounds[0]), int(bounds[-1]) + 1)}
