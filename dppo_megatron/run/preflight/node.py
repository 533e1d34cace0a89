"""Checks a process's node: GPUs, limits, and the run's files."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dppo_megatron.common.hardware import GIB
from dppo_megatron.common.retry import wait_until
from dppo_megatron.config import Config
from dppo_megatron.run.launch.rank_environment import nvidia_smi

NVIDIA_SMI_S = 7.0
VISIBLE_S, POLL_S = 4.0, 0.2  # a network file system may show another node's file later
WRITTEN_BYTES, SLOW_MB_PER_S, MAX_USED_MIB = 32 << 20, 50.0, 4096
OLDEST_DRIVER = {"12": 525, "13": 580}  # major CUDA version of torch -> driver
TOKEN = ".preflight-"  # prefix of file names in the run directory


@dataclass(slots=True)
class Observed:
    problems: list[str] = field(default_factory=list)  # if all nodes have a problem, no node is at fault
    faults: list[str] = field(default_factory=list)  # this node is at fault, so another node may help
    warnings: list[str] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)  # values that must be equal on all nodes
    gpu: str = ""  # UUID


def gpu_rows(out: Observed) -> list[list[str]]:
    """Return [index, UUID, name, driver, used MiB] of each GPU. On an error, add it to `out` and return no rows."""
    try:
        return nvidia_smi("index,uuid,name,driver_version,memory.used", NVIDIA_SMI_S)
    except FileNotFoundError:
        out.warnings.append("GPUs not checked: nvidia-smi is not installed")
    except subprocess.SubprocessError as error:  # a timeout, or an exit code
        out.faults.append(f"{getattr(error, 'stdout', None) or error}".strip())
    return []


def gpu_names(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the GPUs that this process may use, by index or UUID."""
    return [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu] or [row[0] for row in rows]


def look_at_gpus(out: Observed, first: int, cuda: str | None, *, trains: bool) -> None:
    """Check GPU number `first` for a rank, or all GPUs from `first` on for a serving node. See `judge_gpu`."""
    if rows := gpu_rows(out):
        for gpu in range(first, first + 1 if trains else len(gpu_names(rows))):
            judge_gpu(out, rows, gpu, cuda, trains=trains)


def judge_gpu(out: Observed, rows: Sequence[Sequence[str]], local_rank: int, cuda: str | None, *, trains: bool) -> None:
    """Check the GPU of process `local_rank`. A task that Slurm bound to a GPU sees only that GPU.

    cuda: torch's CUDA version.
    """
    names = gpu_names(rows)
    gpu = names[0] if len(names) == 1 else dict(enumerate(names)).get(local_rank)
    row = next((row for row in rows if gpu in row[:2]), None)
    if row is None:
        out.faults.append(f"GPU {gpu} is missing: nvidia-smi lists {len(rows)}, this process has {','.join(names)}")
        return
    _, out.gpu, name, driver, used_mib = row
    out.same |= {"driver": driver} | ({"GPU": name} if trains else {})
    if used_mib.isdecimal() and int(used_mib) > MAX_USED_MIB:
        out.faults.append(f"GPU {out.gpu}: another process uses {used_mib} MiB of it")
    oldest, major = OLDEST_DRIVER.get((cuda or "").partition(".")[0], 0), driver.partition(".")[0]
    if major.isdecimal() and int(major) < oldest:
        out.problems.append(f"driver {driver}: torch for CUDA {cuda} needs {oldest} or newer")


def look_at_limits(out: Observed) -> None:
    shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    memlock, files = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    out.warnings += [f"/dev/shm has {shm >> 20} MiB: NCCL needs more, e.g. 1 GiB"] if shm < GIB else []
    out.warnings += [f"ulimit -l is {memlock >> 10} KiB: InfiniBand needs unlimited"] if 0 <= memlock < GIB else []
    out.warnings += [f"ulimit -Hn is {files}: the run needs 4096 or more"] if 0 <= files < 4096 else []


def look_at_files(out: Observed, config: Config, token: str, name: str, *, trains: bool) -> None:
    """Check that this node sees the driver's file in the run directory, the model and the data.

    Also measures how fast the node writes to the run directory.
    """
    root, data = config.run.dir, config.data
    paths = {config.model.path, config.model.start, *([data.train, data.eval, config.rollout.bank] if trains else [])}
    for path in sorted(filter(None, paths)):
        if path.exists():
            out.same[str(path)] = f"{path.stat().st_size} bytes" if path.is_file() else f"{len(os.listdir(path))} files"
        else:
            out.problems.append(f"{path}: does not exist")
    if not wait_until((root / f"{TOKEN}{token}").exists, VISIBLE_S, POLL_S):
        out.problems.append(f"run.dir = {root}: a file that the driver wrote there is not visible; is it shared?")
        return
    path, began = root / f"{TOKEN}{token}-{name}", time.monotonic()
    try:
        with path.open("wb") as file:
            file.write(os.urandom(WRITTEN_BYTES))
            os.fsync(file.fileno())
        path.unlink()
    except OSError as error:
        out.problems.append(f"run.dir = {root}: cannot be written: {error.strerror}")
        return
    if (speed := WRITTEN_BYTES / (time.monotonic() - began) / 1e6) < SLOW_MB_PER_S:
        out.warnings.append(f"run.dir = {root}: writes {speed:.0f} MB/s")
