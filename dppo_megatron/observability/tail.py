"""Reading a JSONL file that another process is still writing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple


class Batch(NamedTuple):
    records: list[dict[str, Any]]
    restarted: bool  # the file is a new one or was cut: `records` begin at its start


class JsonlFollower:
    """Returns the records appended since the last call; costs one `stat` when there are none.

    A line without its newline is left for the next call. A file that was replaced or cut (a resumed run
    removes the steps it repeats) is read again from the start and reported as `restarted`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file: BinaryIO | None = None  # stays open: its inode cannot be reused by a replacement
        self._offset = 0

    def poll(self) -> Batch:
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return Batch([], False)
        restarted = self._file is not None and self._was_rewritten(status)
        if restarted:
            self.close()
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:  # replaced between the two calls
                return Batch([], restarted)
        if not restarted and status.st_size == self._offset:
            return Batch([], False)
        self._file.seek(self._offset)
        data = self._file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return Batch(parse_lines(data[:end]), restarted)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._offset = None, 0

    def _was_rewritten(self, status: os.stat_result) -> bool:
        assert self._file is not None
        try:
            mine = os.fstat(self._file.fileno())
        except OSError:  # a network file system drops the handle of a removed file
            return True
        return (mine.st_dev, mine.st_ino) != (status.st_dev, status.st_ino) or status.st_size < self._offset


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """All complete records of a file, none when it does not exist; an incomplete last line is ignored."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    return parse_lines(data[: data.rfind(b"\n") + 1])


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects in `data`, one a line; what is not one is skipped (a crash can leave anything)."""
    records = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
