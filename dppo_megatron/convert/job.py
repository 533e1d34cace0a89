"""Running a conversion: shards divided among processes, a receipt for each finished one, one rename at the end.

    .NAME.writing/                the directory being made, beside its destination
        <shards>
        .conversion/job.json      what is being made of what; written first
        .conversion/<shard>.json  one per finished shard, written when its bytes are on the disk
        .conversion/failed.<rank> why a process failed
        .conversion/writing.*/    a shard in the making, of one process alone; renamed when it is on the disk

Processes communicate through this directory alone: each takes the shards whose number is its rank modulo their
count, and process 0 waits for the others' receipts and publishes. A killed conversion loses only the shards in the
making. One that was started twice writes a shard twice, but never into a file that has its receipt.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dppo_megatron.common.files import output, write_json
from dppo_megatron.hf import HFModelConfig, ModelError
from dppo_megatron.hf.safetensors_writer import check_space, publish, refuse_existing, staging_of

from .progress import Progress

_NOTES, _JOB, _WRITING = ".conversion", "job.json", "writing."
_START_TIMEOUT_S = 120.0
_STALL_TIMEOUT_S = 600.0
_POLL_S = 0.1
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


class Conversion(Protocol):
    """What is converted to what. Every process builds the same one; that reads headers only and refuses bad sources."""

    source: Path
    destination: Path
    config: HFModelConfig  # of what is converted
    shards: list[str]  # file names, in the order of their numbers

    @property
    def nbytes(self) -> int:
        """Size of all shards, approximately."""

    def fingerprint(self) -> dict[str, Any]:
        """JSON that is equal for two attempts exactly when their shards belong to one result."""

    def write_shard(self, index: int, path: Path, tick: Callable[[], None]) -> dict[str, Any]:
        """Writes one shard to the disk and returns what `finish` needs of it, JSON. Calls `tick` now and then."""

    def finish(self, staging: Path, records: list[dict[str, Any]]) -> None:
        """Adds what belongs to the whole, when all shards lie in `staging`."""


@dataclass(frozen=True, slots=True)
class Worker:
    """Which of the converting processes this is."""

    rank: int = 0
    size: int = 1

    @classmethod
    def from_environment(cls) -> Worker:
        """As torchrun (RANK) or srun (SLURM_PROCID) set it; alone where neither started this process."""
        for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
            if rank in os.environ and size in os.environ:
                return cls(int(os.environ[rank]), int(os.environ[size]))
        return cls()


def prepare(conversion: Conversion, resume: bool) -> None:
    """Makes the staging directory, or with `resume` checks that the one left behind is of this conversion.

    Raises `ModelError` for an existing destination, an interrupted conversion without `resume`, one that was of
    other files or settings, and too little disk space.
    """
    refuse_existing(conversion.destination, overwrite=False)
    staging = staging_of(conversion.destination)
    job = {"shards": conversion.shards, **conversion.fingerprint()}
    output(conversion.destination, "DST")
    if not staging.exists():
        check_space(staging.parent, conversion.nbytes)
        made = staging.with_name(f"{staging.name}.{os.getpid()}")
        (made / _NOTES).mkdir(parents=True)
        write_json(made / _NOTES / _JOB, job)
        made.rename(staging)  # other processes see it with its job or not at all
        return
    if not resume:
        raise ModelError(
            str(conversion.destination),
            [f"a conversion to it runs or was interrupted; continue with --resume, or remove {staging} to begin anew"],
        )
    _refuse_other_job(staging, job)
    for note in (staging / _NOTES).glob("failed.*"):
        note.unlink()
    # Of this host: whether another's process still runs cannot be seen from here. Publishing removes the others.
    for left in (staging / _NOTES).glob(f"{_WRITING}{socket.gethostname()}.*"):
        if not _is_running(int(left.name.split(".")[-2])):
            shutil.rmtree(left)
    done = sum((staging / shard).stat().st_size for shard in conversion.shards if _receipt(staging, shard))
    check_space(staging, max(conversion.nbytes - done, 0))


def run(conversion: Conversion, worker: Worker, progress: Progress, watch: Callable[[], None] = lambda: None) -> None:
    """Writes this worker's shards; worker 0 then waits for the others and publishes. `prepare` comes first.

    `watch` is called while waiting and may raise.
    Raises what stops a shard, on worker 0 also `ModelError` with the reasons of the others, naming the shards
    that made no progress for ten minutes, or because another worker 0 is running. What was finished stays for
    `--resume`.
    """
    staging = staging_of(conversion.destination)
    with _lock_job(staging) if worker.rank == 0 else contextlib.nullcontext():
        _run(conversion, worker, staging, progress, watch)


def _run(conversion: Conversion, worker: Worker, staging: Path, progress: Progress, watch: Callable[[], None]) -> None:
    own = range(worker.rank, len(conversion.shards), worker.size)
    if worker.rank > 0 and own:
        _wait_for_job(staging, conversion)

    def tick() -> None:
        if _trim is not None:
            _trim(0)  # weights of 1 to 32 MB fragment its heap, which would grow with the model
        progress.show(lambda: _bytes_written(staging, conversion.shards))

    todo = [index for index in own if _receipt(staging, conversion.shards[index]) is None]
    if worker.rank > 0 and conversion.destination.exists():
        return  # nothing was left for this process, and process 0 has published already
    try:
        for index in todo:
            _write_shard(conversion, index, staging, tick)
    except BaseException as error:
        if worker.rank > 0 and staging.exists():
            (staging / _NOTES / f"failed.{worker.rank}").write_text(f"{type(error).__name__}: {error}")
        raise
    if worker.rank > 0:
        return
    _wait_for_others(staging, conversion.shards, worker, lambda: (tick(), watch()))
    records = [_receipt(staging, shard)["record"] for shard in conversion.shards]
    conversion.finish(staging, records)
    publish(staging, conversion.destination)
    shutil.rmtree(conversion.destination / _NOTES, ignore_errors=True)


@contextlib.contextmanager
def _lock_job(staging: Path) -> Iterator[None]:
    """Refuses a second process 0: one would publish what the other is still writing."""
    with (staging / _NOTES / _JOB).open("r+") as job:
        try:
            fcntl.flock(job, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(str(staging), ["another conversion is writing there; wait until it ends"]) from None
        except OSError:
            pass  # a file system without locks
        yield


def _write_shard(conversion: Conversion, index: int, staging: Path, tick: Callable[[], None]) -> None:
    """One shard under a name of its own, then, whole and on the disk, under its final one; then the receipt."""
    shard, notes = conversion.shards[index], staging / _NOTES
    prefix = f"{_WRITING}{socket.gethostname()}.{os.getpid()}."
    with tempfile.TemporaryDirectory(dir=notes, prefix=prefix) as directory:
        path = Path(directory) / shard
        record = conversion.write_shard(index, path, tick)
        receipt = path.with_suffix(".json")
        write_json(receipt, {"nbytes": path.stat().st_size, "record": record})
        path.replace(staging / shard)
        receipt.replace(notes / f"{shard}.json")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _refuse_other_job(staging: Path, job: dict[str, Any]) -> None:
    try:
        found = json.loads((staging / _NOTES / _JOB).read_text())
    except (OSError, ValueError):
        found = {}
    differing = [name for name in job if found.get(name) != job[name]]
    if differing:
        raise ModelError(
            str(staging),
            [f"cannot be resumed: {', '.join(differing)} changed since it was begun; remove it to start afresh"],
        )


def _receipt(staging: Path, shard: str) -> dict[str, Any] | None:
    """The receipt of a shard that is complete, else None."""
    try:
        receipt = json.loads((staging / _NOTES / f"{shard}.json").read_text())
        return receipt if (staging / shard).stat().st_size == receipt["nbytes"] else None
    except (OSError, ValueError):
        return None


def _bytes_written(staging: Path, shards: list[str]) -> int:
    """Bytes of all processes so far."""
    in_the_making = (staging / _NOTES).glob(f"{_WRITING}*/*")
    return sum(_size(path) for path in (*(staging / shard for shard in shards), *in_the_making))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _wait_for_job(staging: Path, conversion: Conversion) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not (staging / _NOTES / _JOB).exists():
        if conversion.destination.exists():
            return
        if time.monotonic() > deadline:
            raise ModelError(
                str(staging),
                [f"process 0 did not begin in {_START_TIMEOUT_S:.0f} s; is this on storage that all processes share?"],
            )
        time.sleep(_POLL_S)
    _refuse_other_job(staging, {"shards": conversion.shards, **conversion.fingerprint()})


def _wait_for_others(staging: Path, shards: list[str], worker: Worker, poll: Callable[[], object]) -> None:
    last, deadline = -1, 0.0
    missing = list(shards)
    while missing := [shard for shard in missing if _receipt(staging, shard) is None]:
        if failed := sorted((staging / _NOTES).glob("failed.*")):
            raise ModelError(
                "conversion", [f"process {note.suffix[1:]} of {worker.size}: {note.read_text()}" for note in failed]
            )
        written = _bytes_written(staging, shards)
        if written != last:
            last, deadline = written, time.monotonic() + _STALL_TIMEOUT_S
        elif time.monotonic() > deadline:
            waited = f"nothing was written for {_STALL_TIMEOUT_S:.0f} s"
            raise ModelError(str(staging), [f"{shard}: waited for its process, {waited}" for shard in missing])
        poll()
        time.sleep(_POLL_S)
