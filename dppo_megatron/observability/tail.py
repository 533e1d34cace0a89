"""Reading a JSONL file of a run that another process may still be writing."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from pydantic import ValidationError

from dppo_megatron.common.files import DamagedFile, adapter, read_regular

T = TypeVar("T")

_MOST_BYTES = 4 << 30
_MOST_STEPS = 10**9
_LATEST = 1e11  # Unix seconds: year 5138
_LARGEST = 1e38  # of a number in float32


class Batch(NamedTuple):
    records: list[dict[str, Any]]
    restarted: bool  # the file is a new one or was cut: `records` begin at its start


class JsonlFollower:
    """Returns the records of metrics appended since the last call; costs one `stat` when there are none.

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
        except OSError:
            return Batch([], False)
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
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
        return Batch(metrics_of(parse_lines(data[:end])), restarted)

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
    """All complete records of a file, none when it does not exist; an incomplete last line is ignored.

    Raises `DamagedFile` where something else is in its place.
    """
    try:
        data = read_regular(Path(path), _MOST_BYTES)
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise DamagedFile(f"{path}: {error}; restore it, or move it away") from None
    return parse_lines(data[: data.rfind(b"\n") + 1])


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """`metrics_of` the records of a file."""
    return metrics_of(read_records(path))


def records_as(kind: type[T], records: Iterable[Mapping[str, Any]]) -> list[T]:
    """The records that have the fields of a dataclass; others, as a crash may leave them, are passed over."""
    found = []
    for record in records:
        with contextlib.suppress(ValidationError):
            found.append(adapter(kind).validate_python(record))
    return found


def metrics_of(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records that have a `step`, an integer, and of each the `time` and all numbers, floats or None (not finite).

    What else a damaged file or another program put there is left out: readers compute with all of it.
    """
    return [_numbers_of(r) for r in records if type(r.get("step")) is int and 0 <= r["step"] <= _MOST_STEPS]


def _numbers_of(record: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {"step": record["step"]}
    for name, value in record.items():
        number = type(value) in (int, float) and abs(value) <= _LARGEST
        if name == "time" and number and 0 <= value <= _LATEST:
            kept[name] = value
        elif name not in ("step", "time") and (number or value is None or type(value) is float):
            kept[name] = value if number else None
    return kept


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects in `data`, one a line; what is not one is skipped (a crash can leave anything)."""
    records = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
