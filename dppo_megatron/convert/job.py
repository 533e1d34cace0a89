"""Runs a conversion. Processes share the shards, each finished shard has a receipt, and a final rename ends the job.

    .NAME.writing/                the directory in progress, next to the destination
        <shards>
        .conversion/job.json      source and settings; written first
        .conversion/lock          locked by process 0
        .conversion/<shard>.json  receipt for a finished shard, written when the shard is on disk
        .conversion/failed.<rank> error message of a process
        .conversion/writing.*/    a process's shard in progress; renamed when it is on disk

Processes communicate only through this directory. Process r of n writes the shards with numbers r, r + n, r + 2n:
with 2 processes, process 0 writes shards 0, 2, 4. Process 0 waits for all receipts and renames the directory. A killed
conversion loses only the shards in progress. If a conversion is started twice, it may write a shard twice, but never
into a file that has a receipt.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from dppo_megatron.common.file_lock import FileLock, LockHeld
from dppo_megatron.common.files import file_size, output, write_json
from dppo_megatron.common.retry import wait_until
from dppo_megatron.errors import ExpectedError
from dppo_megatron.hf import HFModelConfig, ModelError
from dppo_megatron.hf.safetensors_writer import check_space, publish, refuse_existing, staging_of

from .progress import Show, shown_progress

_NOTES, _JOB, _LOCK, _WRITING = ".conversion", "job.json", "lock", "writing."
_START_TIMEOUT_S = 120.0
_STALL_TIMEOUT_S = 600.0
_POLL_S = 0.1
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


class Conversion(Protocol):
    """Defines a conversion. Every process builds it; building reads only headers and rejects bad sources."""

    source: Path
    destination: Path
    config: HFModelConfig
    shards: list[str]  # file names, in order of shard number

    @property
    def nbytes(self) -> int:
        """Return the approximate size of all shards."""

    def fingerprint(self) -> dict[str, Any]:
        """Return JSON that is equal for two attempts only if their shards belong together."""

    def write_shard(self, index: int, path: Path, tick: Callable[[], None]) -> dict[str, Any]:
        """Write a shard to disk and return a JSON record for `finish`. Calls `tick` at intervals."""

    def table(self) -> Iterator[str]:
        """Yield lines that map source tensors to converted ones, for `--dry-run`."""

    def finish(self, staging: Path, records: list[dict[str, Any]]) -> None:
        """Add the files for the whole model once all shards are in `staging`."""


@dataclass(frozen=True, slots=True)
class ConversionWorker:
    """Identifies this process by rank among the converting processes."""

    rank: int = 0
    size: int = 1

    @classmethod
    def from_environment(cls) -> ConversionWorker:
        """Read the variables from torchrun (RANK) or srun (SLURM_PROCID). Without them this is a single process."""
        for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
            if rank in os.environ and size in os.environ:
                return cls(int(os.environ[rank]), int(os.environ[size]))
        return cls()


def prepare(conversion: Conversion, resume: bool) -> None:
    """Create the staging directory. With `resume`, check that an existing directory belongs to this conversion.

    Raises `ModelError` for an existing destination, an interrupted conversion without `resume`, an interrupted
    conversion with other files or settings, and too little disk space.
    """
    refuse_existing(conversion.destination, overwrite=False)
    staging = staging_of(conversion.destination)
    job = {"shards": conversion.shards, **conversion.fingerprint()}
    output(conversion.destination, "DST")
    if not staging.exists():
        check_space(staging.parent, conversion.nbytes)
        temp_dir = staging.with_name(f"{staging.name}.{os.getpid()}")
        (temp_dir / _NOTES).mkdir(parents=True)
        write_json(temp_dir / _NOTES / _JOB, job)
        temp_dir.rename(staging)  # atomic: other processes never see it without job.json
        return
    if not resume:
        raise ModelError(
            str(conversion.destination),
            [f"a conversion to it runs or was interrupted; continue with --resume, or remove {staging} to start again"],
        )
    _refuse_other_job(staging, job)
    for note in (staging / _NOTES).glob("failed.*"):
        note.unlink()
    # Other hosts' directories stay until the final step, because their processes are not visible here.
    for stale_dir in (staging / _NOTES).glob(f"{_WRITING}{socket.gethostname()}.*"):
        if not psutil.pid_exists(int(stale_dir.name.split(".")[-2])):
            shutil.rmtree(stale_dir)
    done = sum((staging / shard).stat().st_size for shard in conversion.shards if _receipt(staging, shard))
    check_space(staging, max(conversion.nbytes - done, 0))


def run(
    conversion: Conversion,
    worker: ConversionWorker,
    show: Show = lambda written: None,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Write this worker's shards. Worker 0 then waits for the others and renames the directory. Call `prepare` first.

    `show` is called with a function that returns the bytes written. `watch` is called while waiting and may raise.
    Raises any error from writing a shard. Worker 0 also raises `ModelError` with the other workers' errors, with the
    missing shards if nothing was written for ten minutes, or if another worker 0 runs. Finished shards stay for
    `--resume`.
    """
    staging = staging_of(conversion.destination)
    with _lock_job(staging) if worker.rank == 0 else contextlib.nullcontext():
        shard_indices = range(worker.rank, len(conversion.shards), worker.size)
        if worker.rank > 0 and shard_indices:
            _wait_for_job(staging, conversion)

        def tick() -> None:
            if _trim is not None:
                _trim(0)  # weights of 1 to 32 MB fragment the heap, which would grow with the model
            show(lambda: _bytes_written(staging, conversion.shards))

        todo = [index for index in shard_indices if _receipt(staging, conversion.shards[index]) is None]
        if worker.rank > 0 and conversion.destination.exists():
            return  # no shard was left for this process, and process 0 has already renamed
        try:
            for index in todo:
                _write_shard(conversion, index, staging, tick)
        except BaseException as error:
            if worker.rank > 0 and staging.exists():
                (staging / _NOTES / f"failed.{worker.rank}").write_text(f"{type(error).__name__}: {error}")
            raise
        if worker.rank > 0:
            return
        conversion.finish(staging, _records_of_all(staging, conversion.shards, worker, tick, watch))
        publish(staging, conversion.destination)
        shutil.rmtree(conversion.destination / _NOTES, ignore_errors=True)


def _lock_job(staging: Path) -> FileLock:
    """Reject a second process 0, which would rename while the first is still writing."""
    try:
        return FileLock(staging / _NOTES / _LOCK, needed=False)
    except LockHeld as error:
        raise ModelError(str(staging), [f"another conversion is writing there: {error}; wait until it ends"]) from None


def _write_shard(conversion: Conversion, index: int, staging: Path, tick: Callable[[], None]) -> None:
    """Write a shard to disk under a temporary name, rename it, then move the receipt into place."""
    shard, notes = conversion.shards[index], staging / _NOTES
    prefix = f"{_WRITING}{socket.gethostname()}.{os.getpid()}."
    with tempfile.TemporaryDirectory(dir=notes, prefix=prefix) as directory:
        path = Path(directory) / shard
        record = conversion.write_shard(index, path, tick)
        receipt = path.with_suffix(".json")
        write_json(receipt, {"nbytes": path.stat().st_size, "record": record})
        path.replace(staging / shard)
        receipt.replace(notes / f"{shard}.json")


def _refuse_other_job(staging: Path, job: dict[str, Any]) -> None:
    try:
        stored_job = json.loads((staging / _NOTES / _JOB).read_text())
    except (OSError, ValueError):
        stored_job = {}
    if differing := [name for name in job if stored_job.get(name) != job[name]]:
        raise ModelError(
            str(staging),
            [f"cannot be resumed: {', '.join(differing)} changed since it was begun; remove it to start again"],
        )


def _receipt(staging: Path, shard: str) -> dict[str, Any] | None:
    """Return a complete shard's receipt, else None."""
    try:
        receipt = json.loads((staging / _NOTES / f"{shard}.json").read_text())
        return receipt if (staging / shard).stat().st_size == receipt["nbytes"] else None
    except (OSError, ValueError):
        return None


def _bytes_written(staging: Path, shards: list[str]) -> int:
    """Return the bytes that all processes have written so far."""
    partial_files = (staging / _NOTES).glob(f"{_WRITING}*/*")
    return sum(file_size(path) or 0 for path in (*(staging / shard for shard in shards), *partial_files))


def _wait_for_job(staging: Path, conversion: Conversion) -> None:
    job = staging / _NOTES / _JOB
    if not wait_until(lambda: job.exists() or conversion.destination.exists(), _START_TIMEOUT_S, _POLL_S):
        raise ModelError(
            str(staging),
            [f"process 0 did not begin in {_START_TIMEOUT_S:.0f} s; use a directory that all processes share"],
        )
    if job.exists():
        _refuse_other_job(staging, {"shards": conversion.shards, **conversion.fingerprint()})


def _records_of_all(
    staging: Path, shards: list[str], worker: ConversionWorker, tick: Callable[[], None], watch: Callable[[], None]
) -> list[dict[str, Any]]:
    """Wait for all processes' receipts and return the records, in the order of `shards`."""
    last, deadline = -1, 0.0
    receipts: dict[str, dict[str, Any]] = {}
    while True:
        receipts |= {s: receipt for s in shards if s not in receipts and (receipt := _receipt(staging, s)) is not None}
        missing = [shard for shard in shards if shard not in receipts]
        if not missing:
            return [receipts[shard]["record"] for shard in shards]
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
        tick()
        watch()
        time.sleep(_POLL_S)


def convert(
    build: Callable[[], Conversion], *, resume: bool = False, processes: int = 1, worker: ConversionWorker | None = None
) -> Conversion | None:
    """Run the conversion that `build` returns. `build` must be picklable if `processes` > 1.

    `worker` identifies this process, by default from the environment, else as the first of `processes`. Returns the
    conversion on rank 0, and None on other torchrun or srun ranks. Raises `ModelError` as `build`, `prepare` and `run`
    do.
    """
    worker = worker or ConversionWorker.from_environment()
    if worker.size > 1:
        processes = 1  # torchrun or srun started them
    elif processes > 1:
        worker = ConversionWorker(0, processes)
    conversion = build()
    if worker.rank == 0:
        prepare(conversion, resume)
    context = multiprocessing.get_context("spawn")
    subprocesses = [
        context.Process(target=_work, args=(build, ConversionWorker(rank, processes)), daemon=True)
        for rank in range(1, processes)
    ]

    def watch() -> None:
        for rank, process in enumerate(subprocesses, 1):
            if process.exitcode:
                raise ModelError(
                    "conversion", [f"process {rank} of {processes} ended with exit code {process.exitcode}"]
                )

    for process in subprocesses:
        process.start()
    try:
        if worker.rank > 0:
            run(conversion, worker)
            return None
        with shown_progress(conversion.destination.name, conversion.nbytes) as show:
            run(conversion, worker, show, watch)
    finally:
        for process in subprocesses:
            process.terminate()  # on success it has nothing left to do
            process.join()
    return conversion


def _work(build: Callable[[], Conversion], worker: ConversionWorker) -> None:
    conversion = build()
    try:
        run(conversion, worker)
    except ExpectedError:
        sys.exit(1)  # process 0 reports it
