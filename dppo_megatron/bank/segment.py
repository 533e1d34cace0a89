"""One segment of a bank, open for writing: its two files change together or not at all."""

from __future__ import annotations

import errno
import logging
import os
import zlib
from pathlib import Path

from dppo_megatron.common.files import sync

from .format import (
    GROUP_HEAD,
    RECORD_HEAD,
    BankCorruption,
    BankEntry,
    BankWriteError,
    parse_group_line,
    segment_paths,
)

log = logging.getLogger(__name__)


class Segment:
    """The two files of segment `number`, created when missing. Call `recover` when they may hold something.

    fsync: flush each record to the device, the blob before its index line.
    Raises `BankWriteError` when they cannot be opened.
    """

    def __init__(self, directory: Path, number: int, fsync: bool):
        self.number = number
        self.groups = 0
        self.data_size = 0  # bytes of whole records
        self._index_size = 0
        self._fsync = fsync
        self._broken: str | None = None
        self._data_path, self._index_path = segment_paths(directory, number)
        # A reader takes the index file as the sign that the segment exists, so the blobs' file comes first.
        self._data = self._index = -1
        try:
            self._data = os.open(self._data_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._index = os.open(self._index_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            sync(directory)
        except OSError as error:
            self._close_files()
            raise self._failure(error, 0) from error

    def write(self, blob: bytes, line: bytes) -> None:
        """Adds one record to both files or, raising `BankWriteError`, leaves both as they were."""
        if self._broken:
            raise BankWriteError(self._broken)
        try:
            if blob:
                _write_all(self._data, blob, self.data_size)
                if self._fsync:
                    os.fdatasync(self._data)
            _write_all(self._index, line, self._index_size)
        except OSError as error:
            self._roll_back()
            raise self._failure(error, len(blob) + len(line)) from error
        self.data_size += len(blob)
        self._index_size += len(line)
        if self._fsync:
            self._sync_index(len(line))

    def recover(self) -> list[int]:
        """Truncates an incomplete tail, sets the counters and returns the positions of the whole records."""
        lines = self._index_path.read_bytes().splitlines(keepends=True)
        stored = os.fstat(self._data).st_size
        positions: list[int] = []
        problem = ""
        for line in lines:
            entry, problem = self._examine(line, len(positions), stored)
            if problem:
                break
            positions.append(int(RECORD_HEAD.match(line)[2]))  # type: ignore[index]
            self._index_size += len(line)
            if entry:
                self.groups += 1
                self.data_size = entry.offset + entry.size
        self._refuse_damage(lines, len(positions), problem, stored)
        self._truncate(problem, stored)
        return positions

    def close(self) -> None:
        """Flushes both files to the device and closes them. Raises `BankWriteError`."""
        try:
            for descriptor in self._open_files():
                os.fsync(descriptor)
        except OSError as error:
            raise self._failure(error, 0) from error
        finally:
            self._close_files()

    def _open_files(self) -> list[int]:
        return [descriptor for descriptor in (self._data, self._index) if descriptor >= 0]

    def _close_files(self) -> None:
        for descriptor in self._open_files():
            os.close(descriptor)
        self._data = self._index = -1

    def _examine(self, line: bytes, record: int, stored: int) -> tuple[BankEntry | None, str]:
        """The entry, when the record is a group, and why the record is not whole; empty when it is."""
        if not line.endswith(b"\n"):
            return None, "its index line ends early"
        if RECORD_HEAD.match(line) is None:
            return None, "its index line is not readable"
        if not line.startswith(GROUP_HEAD):
            return None, ""
        try:
            entry = parse_group_line(line, self.groups, self.number, record)
        except (ValueError, KeyError, IndexError, TypeError):
            return None, "its index line is not readable"
        if entry.offset + entry.size > stored:
            return entry, f"its data ends at byte {entry.offset + entry.size}, the file at {stored}"
        if zlib.crc32(os.pread(self._data, entry.size, entry.offset)) != entry.crc32:
            return entry, "its data does not match its checksum"
        return entry, ""

    def _refuse_damage(self, lines: list[bytes], whole: int, problem: str, stored: int) -> None:
        # A crash leaves an incomplete end. A whole group behind an invalid record means damage, and would be lost.
        for record, line in enumerate(lines[whole + 1 :], start=whole + 1):
            entry, later_problem = self._examine(line, record, stored)
            if entry and not later_problem:
                raise BankCorruption(
                    f"{self._index_path}: record {whole}: {problem}, yet record {record} is whole: damaged "
                    "after writing. Restore both files of this segment, or delete both to sample its prompts "
                    "again"
                )

    def _truncate(self, problem: str, stored: int) -> None:
        index_stored = os.fstat(self._index).st_size
        if stored == self.data_size and index_stored == self._index_size:
            return
        log.warning(
            "%s: truncated a record that was not finished when its writer stopped (%s; %d bytes of data, %d of "
            "index); %d groups of this segment are whole",
            self._data_path,
            problem or "it had no index line yet",
            stored - self.data_size,
            index_stored - self._index_size,
            self.groups,
        )
        # The index first: a crash in between leaves surplus data, which the next opening truncates.
        os.ftruncate(self._index, self._index_size)
        os.ftruncate(self._data, self.data_size)
        os.fsync(self._index)
        os.fsync(self._data)

    def _sync_index(self, size: int) -> None:
        try:
            os.fdatasync(self._index)
        except OSError as error:
            # A reader may have used the record already, so it stays; what the device holds is unknown from
            # here on.
            failure = self._failure(error, size)
            self._broken = f"{failure}. The last record may not survive a power failure; restart to check the bank"
            raise BankWriteError(self._broken, error.errno) from error

    def _roll_back(self) -> None:
        try:
            os.ftruncate(self._index, self._index_size)
            os.ftruncate(self._data, self.data_size)
        except OSError as error:
            self._broken = f"{self._data_path}: a failed write could not be rolled back ({error}); restart to repair it"

    def _failure(self, error: OSError, needed: int) -> BankWriteError:
        return _write_error(self._data_path, error, needed)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _write_error(path: Path, error: OSError, needed: int) -> BankWriteError:
    message = f"{path}: writing a record failed: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        disk = os.statvfs(path.parent)
        message += (
            f"; {disk.f_bavail * disk.f_frsize} bytes free, at least {needed} needed. Free space there or "
            "move run.dir to a larger file system, then resume"
        )
    return BankWriteError(f"{message}. Every record written before is intact", error.errno)
