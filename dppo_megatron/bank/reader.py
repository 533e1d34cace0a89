"""Readers of a bank: any number, in any process, while the writer appends."""

from __future__ import annotations

import os
import time
import zlib
from array import array
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from dppo_megatron.types import RolloutGroup

from .format import (
    GROUP_HEAD,
    RECORD_HEAD,
    BankCorruption,
    BankEntry,
    BankTimeout,
    decode_group,
    parse_group_line,
    segment_paths,
)


class BankReader:
    """Follows the bank in `directory`, which need not exist yet.

    Keeps some 30 bytes per group in memory; index lines and tokens are read on demand.
    """

    def __init__(self, directory: str | Path):
        self._directory = Path(directory)
        self._segment = 0  # being followed
        self._offset = 0  # bytes of its index already read
        self._record = 0  # lines of its index already read
        # Of every group: segment, record, byte offset and size of its index line.
        self._segments = array("l")
        self._records = array("l")
        self._offsets = array("q")
        self._sizes = array("l")

    @property
    def num_groups(self) -> int:
        """Groups found by the last `refresh`."""
        return len(self._segments)

    def refresh(self) -> int:
        """Reads what was added to the index since the last call; returns `num_groups`.

        Raises `BankCorruption` when the index shrank or holds a line that no writer wrote.
        """
        while True:
            # Checked before reading: once a successor exists, nothing is added to this segment.
            finished = self._exists(segment_paths(self._directory, self._segment + 1)[1])
            self._read_new_lines()
            if not finished:
                return self.num_groups
            self._segment += 1
            self._offset = self._record = 0

    def wait_for(self, count: int, timeout_s: float, poll_s: float = 0.01) -> int:
        """Returns `num_groups` once it is at least `count`.

        timeout_s: longest time without any new group, from the start of the call or the last arrival.
        Raises `BankTimeout`.
        """
        started = last_arrival = time.monotonic()
        at_start = self.num_groups
        while True:
            before = self.num_groups
            if self.refresh() >= count:
                return self.num_groups
            now = time.monotonic()
            if self.num_groups > before:
                last_arrival = now
            if now - last_arrival > timeout_s:
                idle = now - last_arrival
                arrived = self.num_groups - at_start
                raise BankTimeout(
                    f"{self._directory}: {self.num_groups} of {count} groups arrived and none for "
                    f"{idle:.1f} s ({arrived} in the {now - started:.1f} s of this wait; timeout {timeout_s:g} s). "
                    "Look at the orchestrator's log"
                )
            time.sleep(poll_s)

    def entries(self, start: int, stop: int) -> list[BankEntry]:
        """Index lines of groups [start, stop) of the training order, read from disk; no tokens.

        Raises `IndexError` when `stop` exceeds `num_groups`.
        """
        if not 0 <= start <= stop <= self.num_groups:
            raise IndexError(f"{self._directory}: groups [{start}, {stop}) of {self.num_groups}")
        found: list[BankEntry] = []
        for segment, numbers in groupby(range(start, stop), key=self._segments.__getitem__):
            found += self._entries_of_segment(segment, list(numbers))
        return found

    def read(self, entry: BankEntry) -> RolloutGroup:
        """The group of an entry; reads its bytes alone.

        Raises `BankCorruption` when they are missing or do not match the entry's checksum.
        """
        path = segment_paths(self._directory, entry.segment)[0]
        where = f"{path}: group {entry.number} (record {entry.record} of segment {entry.segment})"
        try:
            with path.open("rb", buffering=0) as file:
                blob = os.pread(file.fileno(), entry.size, entry.offset)
        except FileNotFoundError:
            raise BankCorruption(f"{where}: the file is gone; restore it, or train from a later step") from None
        if len(blob) != entry.size:
            raise BankCorruption(f"{where}: only {len(blob)} of {entry.size} bytes are there; restore the file")
        if zlib.crc32(blob) != entry.crc32:
            raise BankCorruption(f"{where}: the bytes do not match their checksum; restore the file")
        try:
            return decode_group(blob)
        except ValueError as error:
            raise BankCorruption(f"{where}: {error}") from error

    def _exists(self, path: Path) -> bool:
        try:
            # NFS may remember for a minute that there was no such file, unless the directory is opened first.
            os.close(os.open(self._directory, os.O_RDONLY))
        except FileNotFoundError:
            return False
        return path.exists()

    def _read_new_lines(self) -> None:
        path = segment_paths(self._directory, self._segment)[1]
        try:
            # Opened anew each time: network file systems revalidate their caches on open.
            with path.open("rb", buffering=0) as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    raise BankCorruption(
                        f"{path}: shorter than when last read: records that were in use are gone; "
                        "restart the trainer from its last checkpoint"
                    )
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return
        # A line without its newline is being written: it is read again, whole, next time.
        for line in added[: added.rfind(b"\n") + 1].splitlines(keepends=True):
            if RECORD_HEAD.match(line) is None:
                raise BankCorruption(f"{path}: record {self._record} is not readable; restore the file")
            if line.startswith(GROUP_HEAD):
                self._segments.append(self._segment)
                self._records.append(self._record)
                self._offsets.append(self._offset)
                self._sizes.append(len(line))
            self._offset += len(line)
            self._record += 1

    def _entries_of_segment(self, segment: int, numbers: list[int]) -> Iterator[BankEntry]:
        path = segment_paths(self._directory, segment)[1]
        begin = self._offsets[numbers[0]]
        end = self._offsets[numbers[-1]] + self._sizes[numbers[-1]]
        with path.open("rb", buffering=0) as file:
            lines = os.pread(file.fileno(), end - begin, begin)
        for number in numbers:
            at = self._offsets[number] - begin
            try:
                yield parse_group_line(lines[at : at + self._sizes[number]], number, segment, self._records[number])
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise BankCorruption(
                    f"{path}: record {self._records[number]} is not readable ({error}); restore the file"
                ) from error
