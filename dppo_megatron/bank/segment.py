"""Write a bank segment: both files change together or not at all."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from dppo_megatron.common.files import sync

from .errors import BankWriteError, write_error
from .files import segment_paths

_BUFFERS_A_CALL = 1024  # limit of Linux (IOV_MAX)


class Segment:
    """Opens the two files of segment `number`, creates missing files and truncates both to the given sizes.

    Bytes after these sizes are incomplete records. fsync: flush each record to the device, the blob before the index
    line. Raises `BankWriteError` when the files cannot be opened.
    """

    def __init__(self, directory: Path, number: int, fsync: bool, *, data_size: int = 0, index_size: int = 0):
        self.number = number
        self.data_size = data_size  # bytes of complete records
        self.index_size = index_size
        self._fsync = fsync
        self.failure: str | None = None  # why the content of the files is unknown; then nothing is written to them
        self._data_path, self._index_path = segment_paths(directory, number)
        # A segment exists for readers once the index file exists, so the blob file is created first.
        self._data = self._index = -1
        try:
            self._data = os.open(self._data_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._index = os.open(self._index_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            for descriptor, size in ((self._data, data_size), (self._index, index_size)):
                if os.fstat(descriptor).st_size > size:
                    os.ftruncate(descriptor, size)
            sync(directory)
        except OSError as error:
            self._close_files()
            raise self._failure(error, 0) from error

    def write(self, blob: Sequence[np.ndarray], line: bytes, *, flush: bool = False) -> None:
        """Add a record to both files. If writing raises `BankWriteError`, both files stay as they were.

        If only flushing the index line raises it, the record stays in both files. blob: buffers [uint8], written
        without a copy. flush: flush to the device, regardless of the segment's `fsync`.
        """
        if self.failure:
            raise BankWriteError(self.failure)
        size = sum(map(len, blob))
        try:
            if size:
                _write_all(self._data, blob, self.data_size)
                if self._fsync or flush:
                    os.fdatasync(self._data)
            _write_all(self._index, [np.frombuffer(line, np.uint8)], self.index_size)
        except OSError as error:
            self._roll_back()
            raise self._failure(error, size + len(line)) from error
        self.data_size += size
        self.index_size += len(line)
        if self._fsync or flush:
            self._sync_index(len(line))

    def close(self) -> None:
        """Flush both files to the device and close them. Raises `BankWriteError`."""
        try:
            for descriptor in self._open_files():
                os.fsync(descriptor)
        except OSError as error:
            raise self._failure(error, 0) from error
        finally:
            self._close_files()

    def remove(self) -> None:
        """Close both files and delete them; later writes fail. Further calls have no effect."""
        self._close_files()
        for path in (self._index_path, self._data_path):  # this order leaves no index without blobs after a crash
            path.unlink(missing_ok=True)

    def _open_files(self) -> list[int]:
        return [descriptor for descriptor in (self._data, self._index) if descriptor >= 0]

    def _close_files(self) -> None:
        for descriptor in self._open_files():
            os.close(descriptor)
        self._data = self._index = -1

    def _sync_index(self, size: int) -> None:
        try:
            os.fdatasync(self._index)
        except OSError as error:
            # A reader may have used the record already, so it stays. From here on, the content of the device is
            # unknown.
            failure = self._failure(error, size)
            self.failure = f"{failure}. The last record may not survive a power failure; restart to check the bank"
            raise BankWriteError(self.failure, error.errno) from error

    def _roll_back(self) -> None:
        try:
            os.ftruncate(self._index, self.index_size)
            os.ftruncate(self._data, self.data_size)
        except OSError as error:
            self.failure = f"{self._data_path}: a failed write could not be rolled back ({error}); restart to repair it"

    def _failure(self, error: OSError, needed: int) -> BankWriteError:
        return write_error(self._data_path, error, needed)


def _write_all(descriptor: int, buffers: Sequence[np.ndarray], offset: int) -> None:
    waiting = deque(buffer.data for buffer in buffers if len(buffer))
    while waiting:
        written = os.pwritev(descriptor, list(islice(waiting, _BUFFERS_A_CALL)), offset)
        offset += written
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.popleft())
        if written:
            waiting[0] = waiting[0][written:]
