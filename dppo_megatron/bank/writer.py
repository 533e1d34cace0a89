"""The one writer of a bank: appends records, survives being killed, rolls back what a full disk interrupted."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from dppo_megatron.types import RolloutGroup

from .format import (
    LOCK_NAME,
    RECORD_HEAD,
    BankCorruption,
    BankError,
    BankLocked,
    dropped_line,
    encode_group,
    group_line,
    segment_numbers,
    segment_paths,
)
from .segment import Segment

# Where what one process wrote is at once visible, in order, to every other that can see the file system.
LOCAL_FILE_SYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay", "apfs"})


class BankWriter:
    """Appends groups and dropped prompts to the bank in `directory`, which is created when missing.

    Opening takes an exclusive lock until the process ends, truncates what a crash left half written (with
    a log line) and reads which prompt positions are done. A segment holds `groups_per_segment` groups, so
    with one training step's groups in each, segment s is the batch of step s. Not thread-safe: one call at a
    time.

    fsync: flush every record to the device before `append` returns, some milliseconds each. Without, a
    segment is flushed when it is full: a record survives any crash of processes, but a power failure can lose
    those of the last segment. Readers on other hosts need it, for a network file system shows them unflushed
    files late and out of order. Default: on unless the file system is known to be local.

    Raises `BankLocked` when another writer has the bank, `BankCorruption` when the directory is damaged
    beyond what a crash explains.
    """

    def __init__(self, directory: str | Path, groups_per_segment: int, *, fsync: bool | None = None):
        if groups_per_segment < 1:
            raise ValueError(f"groups_per_segment is {groups_per_segment}, expected at least 1")
        self._directory = Path(directory)
        self._groups_per_segment = groups_per_segment
        self._directory.mkdir(parents=True, exist_ok=True)
        self._fsync = not _is_local(self._directory) if fsync is None else fsync
        self._lock = _acquire_lock(self._directory / LOCK_NAME)
        try:
            self._done: set[int] = set()
            self._num_groups = 0
            self._segment = self._recover()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def num_train_groups(self) -> int:
        """Groups in the bank; training step s uses groups [s G, (s + 1) G) in the order of appending."""
        return self._num_groups

    def done_positions(self) -> frozenset[int]:
        """Prompt positions of all records, group or dropped: what must not be sampled again."""
        return frozenset(self._done)

    def append(self, group: RolloutGroup) -> int:
        """Writes one group and returns its number in the training order.

        Raises `ValueError` for a malformed group or a position that is already done, `BankWriteError` when
        the disk refuses it; the bank is then as before the call, and the call may be repeated once there is
        space.
        """
        self._require_new(group.prompt.position)
        blob = encode_group(group)
        segment = self._segment_for_next_record()
        segment.write(blob, group_line(group, segment.data_size, blob))
        segment.groups += 1
        self._done.add(group.prompt.position)
        self._num_groups += 1
        return self._num_groups - 1

    def drop(self, position: int, row: int, reason: str, detail: str = "") -> None:
        """Records that a prompt is done and yields no group. Raises as `append`."""
        self._require_new(position)
        self._segment_for_next_record().write(b"", dropped_line(position, row, reason, detail))
        self._done.add(position)

    def close(self) -> None:
        """Flushes to the device and gives the lock back. Harmless when repeated."""
        if self._lock < 0:
            return
        try:
            self._segment.close()
        finally:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> BankWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_new(self, position: int) -> None:
        if self._lock < 0:
            raise BankError(f"{self._directory}: the writer is closed")
        if position in self._done:
            raise ValueError(
                f"prompt position {position} is already in the bank {self._directory}; see done_positions()"
            )

    def _segment_for_next_record(self) -> Segment:
        if self._segment.groups >= self._groups_per_segment:
            self._segment.close()
            self._segment = Segment(self._directory, self._segment.number + 1, self._fsync)
        return self._segment

    def _recover(self) -> Segment:
        numbers = segment_numbers(self._directory) or [0]
        for number in numbers[:-1]:
            self._read_finished_segment(segment_paths(self._directory, number)[1])
        segment = Segment(self._directory, numbers[-1], self._fsync)
        try:
            self._done.update(segment.recover())
        except BaseException:
            segment.close()
            raise
        self._num_groups += segment.groups
        return segment

    def _read_finished_segment(self, path: Path) -> None:
        # Only the last segment can be incomplete: every other was flushed to the device before the next was begun.
        for record, line in enumerate(path.read_bytes().splitlines(keepends=True)):
            head = RECORD_HEAD.match(line)
            if head is None or not line.endswith(b"\n"):
                raise BankCorruption(f"{path}: record {record} is not readable; restore the file or start a new run")
            self._done.add(int(head[2]))
            self._num_groups += head[1] == b"group"


def _acquire_lock(path: Path) -> int:
    # flock, not lockf: it also excludes a second writer in the same process.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 4096, 0)
        os.close(descriptor)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise BankError(
                f"{path}: cannot lock ({error.strerror}); is the file system mounted without locks?"
            ) from error
        raise BankLocked(
            f"{path.parent}: another process is writing this bank: {_describe_holder(holder)}. "
            "Stop it first, or use another run.dir"
        ) from None
    os.ftruncate(descriptor, 0)
    this_process = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.pwrite(descriptor, json.dumps(this_process).encode(), 0)
    return descriptor


def _describe_holder(text: bytes) -> str:
    try:
        holder: dict[str, Any] = json.loads(text)
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "unknown holder"


def _is_local(directory: Path) -> bool:
    place = directory.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if place.is_relative_to(m.mountpoint)]
    # The longest mount point is the nearest; of equals the last one mounted hides the others.
    nearest = max(enumerate(mounts), key=lambda m: (len(m[1].mountpoint), m[0]), default=None)
    return nearest is not None and nearest[1].fstype in LOCAL_FILE_SYSTEMS
