"""What one process finds on its node: GPU, limits, and whether the run's files are there."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dppo_megatron.common.hardware import GIB
from dppo_megatron.common.retry import wait_until
from dppo_megatron.config import Config

NVIDIA_SMI_S = 7.0
VISIBLE_S, POLL_S = 4.0, 0.2  # for a network file system to show another node's file
WRITTEN_BYTES, CHUNK_BYTES, WRITE_S, SLOW_MB_PER_S = 32 << 20, 4 << 20, 2.0, 50.0
MOST_USED_MIB = 4096
TOKEN = ".preflight-"  # of files in the run directory
OLDEST_DRIVER = {"12": 525, "13": 580}  # by torch's CUDA
_QUERY = "index,uuid,name,driver_version,memory.used"


@dataclass(slots=True)
class Observed:
    problems: list[str] = field(default_factory=list)  # where all nodes have it, of the config or the cluster
    faults: list[str] = field(default_factory=list)  # of this node
    warnings: list[str] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)  # to be equal on all nodes
    gpu: str = ""  # UUID


def look_at_gpu(out: Observed, local_rank: int, *, cuda: str | None, sees: bool, trains: bool) -> None:
    """The GPU of the process `local_rank`. cuda: the version of torch's; sees: whether torch finds a GPU."""
    if cuda and not sees:
        out.faults.append(
            f"torch sees no GPU, CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
        )
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True).stdout
    except FileNotFoundError:
        out.warnings.append("GPUs not checked: nvidia-smi is not installed")
    except subprocess.SubprocessError as error:  # a time-out, or an exit code
        out.faults.append(f"nvidia-smi: {getattr(error, 'stdout', None) or error}")
    else:
        rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
        judge_gpu(out, rows, os.environ.get("CUDA_VISIBLE_DEVICES", ""), local_rank, cuda=cuda, trains=trains)


def judge_gpu(
    out: Observed, rows: Sequence[Sequence[str]], visible: str, local_rank: int, *, cuda: str | None, trains: bool
) -> None:
    """The same from the rows of nvidia-smi. visible: indices or UUIDs; a task that is bound to a GPU sees that one."""
    names = [name for name in visible.split(",") if name] or [row[0] for row in rows]
    own = names[0] if len(names) == 1 else dict(enumerate(names)).get(local_rank)
    found = [row for row in rows if own in row[:2]]
    if not found:
        out.faults.append(
            f"GPU {local_rank} is missing: nvidia-smi lists {len(rows)}, CUDA_VISIBLE_DEVICES is {visible!r}"
        )
        return
    _, out.gpu, name, driver, used = found[0]
    out.same |= {"driver": driver} | ({"GPU": name} if trains else {})
    if used.isdecimal() and int(used) > MOST_USED_MIB:
        out.faults.append(f"GPU {out.gpu}: another process holds {used} MiB of it")
    oldest, major = OLDEST_DRIVER.get((cuda or "").partition(".")[0], 0), driver.partition(".")[0]
    if major.isdecimal() and int(major) < oldest:
        out.problems.append(f"driver {driver}: torch for CUDA {cuda} needs {oldest} or newer")


def look_at_limits(out: Observed) -> None:
    shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    memlock, files = (resource.getrlimit(limit) for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    for low, text in (
        (shm < GIB, f"/dev/shm has {shm >> 20} MiB: NCCL needs more, give the container 1 GiB"),
        (0 <= memlock[0] < GIB, f"ulimit -l is {memlock[0] >> 10} KiB: InfiniBand needs unlimited"),
        (0 <= files[1] < 4096, f"ulimit -Hn is {files[1]}: the run needs 4096 or more"),
    ):
        out.warnings += [text] if low else []


def look_at_files(out: Observed, config: Config, token: str, own: str, *, trains: bool) -> None:
    """Whether this node sees the file that the driver left in the run directory, and the others; and writes there."""
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
    scratch = root / f"{TOKEN}{token}-{own}"
    try:
        if (speed := _write_speed(scratch)) < SLOW_MB_PER_S:
            out.warnings.append(f"run.dir: writes {speed:.0f} MB/s")
    except OSError as error:
        out.problems.append(f"run.dir = {root}: cannot be written: {error.strerror}")
    else:
        scratch.unlink()


def _write_speed(path: Path) -> float:
    """MB/s to the device."""
    began, written, chunk = time.monotonic(), 0, os.urandom(CHUNK_BYTES)
    with path.open("wb") as file:
        while written < WRITTEN_BYTES and time.monotonic() < began + WRITE_S:
            written += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    return written / (time.monotonic() - began) / 1e6
