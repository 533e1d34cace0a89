"""Writes a checkpoint while training continues: files in host memory, and the thread that writes them.

At a step boundary each rank copies its files to host memory, so that later training cannot change them. Afterwards
ranks coordinate only through the directory, never in a collective that runs next to training's collectives. Each rank
writes a note when its files are on disk, and rank 0 then completes the checkpoint. A thread writes, because Megatron's
asynchronous save forks. A process with CUDA and NCCL threads does not survive a fork:
https://docs.pytorch.org/docs/stable/notes/multiprocessing.html#cuda-in-multiprocessing
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem

from dppo_megatron.common.files import SteadyFile, write_atomic
from dppo_megatron.hf.safetensors_file import bytes_of

from .directory import CheckpointError

_FIRST_POLL_S, _POLL_S = 0.02, 1.0  # the storage may be slow to list, and there may be thousands of ranks
_ANNOUNCED, _FAILED, _MOVED = "written-by", "failed", "moved"


class Files(FileSystem):
    """Implements a file system for torch's checkpoint writer."""

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Declare that nothing else uses `tensors` from now on, so `hold` may return them and their views uncopied."""

    def hold(self, tensor: Tensor) -> Tensor:
        """Return the tensor to write for `tensor`: the tensor itself, or a copy."""
        return tensor


class DiskFiles(Files):
    """Writes files on disk; calls `moved` as they grow."""

    def __init__(self, moved: Callable[[], None]) -> None:
        self._moved = moved

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[SteadyFile]:
        with SteadyFile(Path(path), self._moved) as file:
            yield file


class _MemoryFile(io.RawIOBase):
    """Represents a file as a list of written pieces. Finds tensors in `tensors` by address and does not copy them."""

    def __init__(self, tensors: dict[int, Tensor]):
        self._tensors = tensors
        self._pieces: deque[bytes | memoryview] = deque()
        self._size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        tensor = self._tensors.pop(np.frombuffer(view, np.uint8).ctypes.data, None)
        self._pieces.append(bytes_of(tensor) if tensor is not None and tensor.nbytes == view.nbytes else bytes(view))
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._size

    def close(self) -> None:
        """Keep the contents, because torch closes the file after writing it."""

    def drain(self) -> Iterator[bytes | memoryview]:
        while self._pieces:
            yield self._pieces.popleft()


class HostFiles(Files):
    """Keeps files in memory; `write` writes them to disk.

    Each tensor is stored once, because torch.save passes the tensor's memory to the file without a copy.
    """

    def __init__(self) -> None:
        self._files: dict[Path, _MemoryFile] = {}
        self._adopted: set[int] = set()  # addresses of storages
        self._tensors: dict[int, Tensor] = {}  # maps an address to a tensor until the tensor is written

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        self._adopted.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def hold(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        is_adopted = tensor.is_cpu and tensor.untyped_storage().data_ptr() in self._adopted
        if is_adopted and tensor.is_contiguous() and tensor.numel():
            # The storage has only these bytes, because torch.save would write a view's whole storage.
            tensor = torch.frombuffer(bytes_of(tensor), dtype=tensor.dtype).view(tensor.shape)
        else:
            tensor = tensor.to("cpu", copy=True)
        self._tensors[tensor.data_ptr()] = tensor
        return tensor

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[_MemoryFile]:
        stream = self._files[Path(path)] = _MemoryFile(self._tensors)
        yield stream

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        self._files[Path(new_path)] = self._files.pop(Path(path))

    def exists(self, path: str | os.PathLike) -> bool:
        return Path(path) in self._files

    def rm_file(self, path: str | os.PathLike) -> None:
        del self._files[Path(path)]

    def write(self, moved: Callable[[], None] = lambda: None) -> None:
        """Write and sync each file and free the memory; call `moved` after each part."""
        while self._files:
            path, stream = self._files.popitem()
            with SteadyFile(path, moved) as file:
                for piece in stream.drain():
                    file.write(piece)


class BackgroundWrite:
    """Writes a checkpoint on this rank.

    partial: all ranks write into this directory. When all have written, rank 0 calls `complete` to rename it. After a
    crash the directory keeps the partial name, and no process reads it.
    timeout_s: the longest time without any write by any rank.
    """

    def __init__(
        self, files: HostFiles, partial: Path, rank: int, ranks: int, complete: Callable[[], None], timeout_s: float
    ):
        self._files, self._partial, self._complete = files, partial, complete
        self._rank, self._ranks, self._timeout_s = rank, ranks, timeout_s
        self._error: Exception | None = None
        self._moved_at = self._touched_at = time.monotonic()
        self._mtime = 0.0
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, alive: Callable[[], None] = lambda: None) -> None:
        """Wait until the checkpoint is complete. Every rank returns at about the same time, without a collective.

        Calls `alive` while bytes are written. Raises the error of any rank, or CheckpointError if no rank writes
        anything for `timeout_s`.
        """
        while self._thread.is_alive():
            moved_at = self._moved_at
            self._thread.join(_POLL_S)
            if self._moved_at > moved_at:
                alive()
            if time.monotonic() - self._moved_at > self._timeout_s + 2 * _POLL_S:
                raise self._timed_out()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._files.write(self._moved)
            (self._partial / f"{_ANNOUNCED}-{self._rank}").touch()
            if self._rank == 0:
                self._until(lambda: len(self._written_notes()) == self._ranks)
                for note in self._written_notes():
                    note.unlink()
                (self._partial / _MOVED).unlink(missing_ok=True)
                self._complete()
            else:
                self._until(lambda: not self._partial.exists())
        except Exception as error:
            self._error = error
            self._report(error)

    def _moved(self) -> None:
        """Record that this rank has written more bytes, and touch a file that the other ranks watch."""
        self._moved_at = time.monotonic()
        if self._moved_at - self._touched_at > _POLL_S:
            self._touched_at = self._moved_at
            (self._partial / _MOVED).touch()

    def _look(self) -> None:
        try:
            mtime = (self._partial / _MOVED).stat().st_mtime
        except FileNotFoundError:  # no rank had to wait yet, or the checkpoint is complete
            return
        if mtime != self._mtime:
            self._mtime, self._moved_at = mtime, time.monotonic()

    def _written_notes(self) -> list[Path]:
        try:
            names = os.listdir(self._partial)  # a glob would read the directory twice, and it may be renamed in between
        except FileNotFoundError:
            return []
        return [self._partial / name for name in names if name.startswith(_ANNOUNCED)]

    def _until(self, done: Callable[[], bool]) -> None:
        pause = _FIRST_POLL_S
        while not done():
            if (self._partial / _FAILED).exists():
                raise CheckpointError(f"{self._partial.name}: {(self._partial / _FAILED).read_text()}")
            self._look()
            if time.monotonic() - self._moved_at > self._timeout_s:
                raise self._timed_out()
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S)

    def _report(self, error: Exception) -> None:
        """Write a note with the error, so that the other ranks do not wait for the timeout.

        If the note cannot be written, the other ranks wait for the timeout.
        """
        note = self._partial / _FAILED
        try:
            if not note.exists():
                write_atomic(note, f"rank {self._rank}: {type(error).__name__}: {error}")
        except OSError:
            pass

    def _timed_out(self) -> CheckpointError:
        written = {note.name.rpartition("-")[2] for note in self._written_notes()}
        missing = [str(rank) for rank in range(self._ranks) if str(rank) not in written]
        return CheckpointError(
            f"{self._partial}: nothing was written for {self._timeout_s:.0f} s (checkpoint.timeout_s), ranks missing: "
            f"{', '.join(missing) or 'none'}; the storage is slow or full, or a rank has ended"
        )
