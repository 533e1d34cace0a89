"""Append records to a bank as the only writer. Records survive a kill; partial writes are rolled back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from dppo_megatron.common.file_lock import NO_LOCKS, FileLock, LockHeld
from dppo_megatron.types import RolloutGroup

from . import lines
from .blob import encode_group
from .checks import check_group
from .errors import BankError, BankLocked, BankWriteError, not_accessible, write_error
from .files import FORMAT, HEAD_NAME, Closed, Head, is_local
from .ledger import Ledger
from .reader import BankReader
from .recovery import recover
from .retention import delete_unneeded
from .segment import Segment

log = logging.getLogger(__name__)

LOCK_NAME = "writer.lock"

T = TypeVar("T")


class BankWriter:
    """Appends groups and dropped prompts to the bank in `directory`, which is created when missing.

    Opening takes an exclusive lock until `close` or the process end. It truncates a record that a crash left incomplete
    (with a log line) and reads which prompt positions are done. A segment has `groups_per_segment` groups: if this is
    the number of groups in a training step, segment s is the batch of step s. A writer thread encodes and writes groups
    in the order of the calls; the calls come from a single thread.

    fsync: flush every record to the device before `append` returns; this takes some milliseconds each. Without `fsync`,
    a segment is flushed when it is full. A record then survives any process crash, but a power failure can lose records
    in the last segment. Readers on other hosts need `fsync`, because a network file system shows them unflushed files
    late and out of order. By default `fsync` is on unless the file system is known to be local.

    Raises `BankLocked` when another writer has the bank, `BankCorruption` when the directory is damaged in a way that a
    crash cannot explain, `BankError` when it cannot be written to.
    """

    def __init__(self, directory: str | Path, groups_per_segment: int, *, fsync: bool | None = None):
        if groups_per_segment < 1:
            raise ValueError(f"groups_per_segment is {groups_per_segment}, expected at least 1")
        self._directory = Path(directory)
        self._groups_per_segment = groups_per_segment
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._fsync = not is_local(self._directory) if fsync is None else fsync
        except OSError as error:
            raise not_accessible(self._directory, error) from error
        self._lock = _WriterLock(self._directory)
        try:
            self._ledger, self._segment = self._open()
        except OSError as error:
            self._lock.release()
            raise not_accessible(self._directory, error) from error
        except BaseException:
            self._lock.release()
            raise
        self._done = self._ledger.positions.to_set()
        self._deleted = 0  # segments before this have no data that the trainer released
        # No lock: only the caller's thread changes the begun groups, and only the writer thread the failed groups.
        self._stored_before, self._num_begun, self._failed = len(self._ledger.segments), 0, 0
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "bank-writer")

    @property
    def num_train_groups(self) -> int:
        """Return the number of groups in the bank; step s uses groups [s G, (s + 1) G) in the order of appending."""
        return len(self._ledger.segments)

    @property
    def num_begun_groups(self) -> int:
        """Return `num_train_groups` plus the groups that are being written."""
        return self._stored_before + self._num_begun - self._failed

    def done_positions(self) -> frozenset[int]:
        """Return the prompt positions of all groups and dropped prompts, which must not be sampled again."""
        return frozenset(self._done)

    def reader(self) -> BankReader:
        """Return a reader that shares this writer's index and so has every written group without `refresh`."""
        return BankReader(self._directory, self._ledger)

    def append(self, group: RolloutGroup) -> int:
        """Write a group and return its number in the training order.

        Raises `ValueError` for a malformed group or a position that is already done, and `BankWriteError` when the
        write fails. The bank is then unchanged, and the call may be repeated once there is space. Raises `BankLocked`
        when another writer may have the bank.
        """
        return self.begin_append(group).result()

    def begin_append(self, group: RolloutGroup) -> Future[int]:
        """Call `append` in the writer thread; the group is in the bank once the future has the number.

        The group's arrays must not change until then. Raises at once for a position that is already done.
        """
        return self._begin(group.prompt.position, lambda: self._append(group), groups=1)

    def drop(self, position: int, row: int, reason: str, detail: str = "") -> None:
        """Record that a prompt is done and yields no group. Raises the same errors as `append`."""
        self.begin_drop(position, row, reason, detail).result()

    def begin_drop(self, position: int, row: int, reason: str, detail: str = "") -> Future[None]:
        """Call `drop` in the writer thread. Raises at once for a position that is already done or negative."""
        if position < 0 or row < 0:
            raise ValueError(f"dropped prompt {position} of row {row}: position and row count from 0")
        return self._begin(position, lambda: self._drop(position, row, reason, detail))

    def close(self) -> None:
        """Wait for pending writes, flush to the device and release the lock. Further calls have no effect."""
        if self._thread is None:
            return
        self._thread.shutdown()
        self._thread = None
        try:
            self._segment.close()
            self._lock.check()
            self._mark_closed()
        finally:
            self._lock.release()

    def __enter__(self) -> BankWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, position: int, write: Callable[[], T], groups: int = 0) -> Future[T]:
        if self._thread is None:
            raise BankError(f"{self._directory}: the writer is closed")
        if position in self._done:
            raise ValueError(
                f"prompt position {position} is already in the bank {self._directory}; leave out `done_positions()`"
            )
        self._done.add(position)
        self._num_begun += groups
        return self._thread.submit(self._write, position, write, groups)

    # The methods below run in the writer thread.

    def _write(self, position: int, write: Callable[[], T], groups: int) -> T:
        try:
            self._lock.check()
            return write()
        except BaseException:
            self._failed += groups
            self._done.discard(position)
            raise

    def _append(self, group: RolloutGroup) -> int:
        check_group(group)
        encoded = encode_group(group)
        segment = self._segment_for_next_record()
        self._add(encoded.buffers, lines.group_line(group, segment.data_size, encoded))
        return len(self._ledger.segments) - 1

    def _drop(self, position: int, row: int, reason: str, detail: str) -> None:
        self._segment_for_next_record()
        self._add([], lines.dropped_line(position, row, reason, detail))

    def _add(self, blob: list[np.ndarray], line: bytes) -> None:
        self._segment.write(blob, line)
        self._ledger.add(line)

    def _open(self) -> tuple[Ledger, Segment]:
        head = Head.read(self._directory)
        ledger = recover(self._directory)
        if ledger.lines == 0:
            return ledger, self._begin_segment(ledger)
        if head != Head(FORMAT, ledger.segment):
            # After a closed writer, the files may now grow beyond the recorded sizes. If a writer was killed between a
            # segment's begin line and head.json, no second line may follow before head.json names the segment.
            self._write_head(ledger.segment)
        sizes = {"data_size": ledger.data_size, "index_size": ledger.index_size}
        return ledger, Segment(self._directory, ledger.segment, self._fsync, **sizes)

    def _segment_for_next_record(self) -> Segment:
        ledger = self._ledger
        if ledger.groups >= self._groups_per_segment or ledger.ended:
            if not ledger.ended:
                self._add([], lines.end_line(ledger.groups, ledger.dropped, ledger.data_size))
            self._segment.close()
            ledger.next_segment()
        if self._segment.number != ledger.segment:
            self._segment = self._begin_segment(ledger)
            self._deleted = delete_unneeded(self._directory, self._deleted, ledger.segment)
        return self._segment

    def _begin_segment(self, ledger: Ledger) -> Segment:
        segment = Segment(self._directory, ledger.segment, self._fsync)
        line = lines.begin_line(ledger.segment, ledger.chain)
        try:
            segment.write([], line, flush=True)  # a power failure must not leave a head that names an empty segment
            self._write_head(ledger.segment)
        except BaseException:
            segment.close()
            raise
        ledger.add(line)
        return segment

    def _write_head(self, segment: int, closed: Closed | None = None) -> None:
        try:
            Head(FORMAT, segment, closed).write(self._directory)
        except OSError as error:
            raise write_error(self._directory / HEAD_NAME, error, 200) from error

    def _mark_closed(self) -> None:
        ledger = self._ledger
        if self._segment.failure or self._segment.number != ledger.segment:
            return
        try:
            self._write_head(ledger.segment, Closed(ledger.index_size, ledger.data_size, f"{ledger.chain:08x}"))
        except BankWriteError as error:
            log.warning("%s. The next writer opens the bank as after a killed writer", error)


class _WriterLock(FileLock):
    """Takes the lock when created. Raises `BankLocked` when another writer, in this or another process, has it."""

    def __init__(self, directory: Path):
        path = directory / LOCK_NAME
        try:
            super().__init__(path)
        except LockHeld as lock_error:
            raise BankLocked(
                f"{directory}: another process is writing this bank: {lock_error}. Stop it first, or use "
                "another run.dir"
            ) from None
        except OSError as error:
            if error.errno in NO_LOCKS:
                raise BankError(
                    f"{path}: cannot lock ({error.strerror}); is the file system mounted without locks?"
                ) from error
            raise not_accessible(path, error) from error

    def check(self) -> None:
        """Raise `BankLocked` when the file was deleted or replaced, because another writer may have taken the bank."""
        locked_stat = os.fstat(self.descriptor)
        try:
            path_stat = os.stat(self._path)
            if (locked_stat.st_dev, locked_stat.st_ino) == (path_stat.st_dev, path_stat.st_ino):
                return
            reason = f"is another file now, of {self.holder()}"
        except FileNotFoundError:
            reason = "is gone"
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
        raise BankLocked(
            f"{self._path}: {reason}, though this process has locked the bank; it writes nothing more. Every record "
            "that it wrote is intact; make sure that no other orchestrator runs, then resume"
        )
