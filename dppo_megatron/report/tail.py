"""Appends to a run's JSONL files, and reads them while another process may append."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress, takewhile
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import ValidationError

from dppo_megatron.common.files import DamagedFile, adapter, is_irregular, naming_a_full_disk, write_atomic

from .names import evaluated_sets

logger = logging.getLogger(__name__)

T = TypeVar("T")

Select = Callable[[Iterable[bytes]], Iterable[bytes]]  # chooses lines, because parsing is 20 x slower than reading

BEGINNING, NEWEST = 100, 250  # lines, and steps
_REWARD = re.compile(rb'"rollout/reward_mean": ([-+.\deE]+)')
_STEP = re.compile(rb'\{"step": (\d{1,10})[,}].*\}\n?', re.DOTALL)
_MAX_STEPS = 10**9
_LATEST = 1e11  # Unix seconds: year 5138
_LARGEST = 1e38  # limit for a float32 number


class JsonlFollower:
    """Reads the metric records appended since the last call. An idle call costs one `stat`.

    A line without a newline waits for the next call. A file that was replaced or cut (a resumed run removes the steps
    that it repeats) is read again from the start and reported as `restarted`. `select` chooses the lines in each call
    that reads from the start.
    """

    def __init__(self, path: str | Path, select: Select = iter):
        self.path = Path(path)
        self._select = select
        self._file: BinaryIO | None = None  # stays open, so a replacement cannot reuse the inode
        self._offset = 0

    def poll(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the new records, and whether the file was replaced or cut, so that they begin at its start."""
        try:
            status = os.stat(self.path)
        except OSError:
            return [], False
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
            return [], False
        restarted = self._file is not None and self._was_rewritten(status)
        if restarted:
            self.close()
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:  # replaced between the two calls
                return [], restarted
        if not restarted and status.st_size == self._offset:
            return [], False
        select = iter if self._offset else self._select
        return list(metrics_of(parse_lines(select(self._new_lines(self._file))))), restarted

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._offset = None, 0

    def _new_lines(self, file: BinaryIO) -> Iterator[bytes]:
        file.seek(self._offset)
        for line in _whole_lines(file):
            self._offset += len(line)
            yield line

    def _was_rewritten(self, status: os.stat_result) -> bool:
        assert self._file is not None
        try:
            mine = os.fstat(self._file.fileno())
        except OSError:  # a network file system drops the handle of a removed file
            return True
        return (mine.st_dev, mine.st_ino) != (status.st_dev, status.st_ino) or status.st_size < self._offset


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Return all complete records in a file. Raises `DamagedFile` like `each_record`."""
    return list(each_record(path))


def each_record(path: str | Path, select: Select = iter) -> Iterator[dict[str, Any]]:
    """Yield the complete records in the lines that `select` chooses, or none if the file does not exist.

    Ignores an incomplete last line. Raises `DamagedFile` if the path is not a regular file or cannot be read.
    """
    try:
        if is_irregular(path):  # reading a pipe or device may not end
            raise DamagedFile(f"{path}: not a regular file; restore it, or move it away")
        with open(path, "rb") as file:
            yield from parse_lines(select(_whole_lines(file)))
    except FileNotFoundError:
        return
    except OSError as error:
        raise DamagedFile(f"{path}: cannot be read: {error.strerror}; restore it, or move it away") from None


def read_metrics(path: str | Path, select: Select = iter) -> list[dict[str, Any]]:
    """Return the metrics in a file: apply `metrics_of` to all records."""
    return list(metrics_of(each_record(path, select)))


def sparse(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines that readers of a long run need, in file order.

    These are all lines from the NEWEST-th newest step on. Earlier lines are reduced to the first BEGINNING lines,
    evaluations (in separate records), and steps with a new lowest or highest mean reward.
    """
    last: deque[tuple[bytes, bool]] = deque()
    steps, earlier, lowest, highest = 0, 0, math.inf, -math.inf
    for new in lines:
        last.append((new, b'"train/' in new or b'"time/step_s"' in new))  # `is_step_record` before parsing
        steps += last[-1][1]
        while steps > NEWEST:
            line, is_step = last.popleft()
            steps, earlier = steps - is_step, earlier + 1
            reward = float(match[1]) if is_step and (match := _REWARD.search(line)) else math.nan
            if reward < lowest or reward > highest:
                lowest, highest = min(lowest, reward), max(highest, reward)
            elif earlier > BEGINNING and (is_step or not has_evaluation(line)):
                continue
            yield line
    yield from (line for line, _ in last)


def has_evaluation(line: bytes) -> bool:
    return b'"eval/' in line[:100]  # after step and time; searching a whole step line takes 2 us


def evaluated(path: str | Path) -> set[tuple[int, str]]:
    """Return (step, set) for every evaluation in a file."""
    records = read_metrics(path, lambda lines: filter(has_evaluation, lines))
    return {(record["step"], name) for record in records for name in evaluated_sets(record)}


def records_as(kind: type[T], records: Iterable[Mapping[str, Any]]) -> list[T]:
    """Parse the records that have the fields of dataclass `kind`. Skips other records, which a crash may leave."""
    instances = []
    for record in records:
        with contextlib.suppress(ValidationError):
            # typeshed: a function with lru_cache does not accept type[T].
            instances.append(adapter(kind).validate_python(record))  # type: ignore[arg-type]
    return instances


def metrics_of(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield `step`, `time` and numbers of the records with an integer `step`. A non-finite number becomes None.

    Other values may come from a damaged file or another program. They are left out, because readers compute with all
    values.
    """
    return (_numbers_of(r) for r in records if type(r.get("step")) is int and 0 <= r["step"] <= _MAX_STEPS)


def _numbers_of(record: dict[str, Any]) -> dict[str, Any]:
    numbers: dict[str, Any] = {"step": record["step"]}
    for name, value in record.items():
        number = type(value) in (int, float) and abs(value) <= _LARGEST
        if name == "time" and number and 0 <= value <= _LATEST:
            numbers[name] = value
        elif name not in ("step", "time") and (number or value is None or type(value) is float):
            numbers[name] = value if number else None
    return numbers


def parse_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON object in each line. Skips other lines, because a crash can leave any bytes."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


class JsonlFile:
    """Appends records with a `step` to a JSONL file, one per line.

    With `resume_step`, first removes the records of later steps. Otherwise renames an older file. Each line reaches the
    operating system completely or is removed again, so a killed trainer loses no logged record.
    """

    def __init__(self, path: Path, resume_step: int | None = None):
        if path.exists():
            if resume_step is None:
                _set_aside(path)
            else:
                _remove_after(path, resume_step)
        self._path = path
        self._file = path.open("ab", buffering=0)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record. Raises ValueError once closed, and OSError if the disk is full; the file stays unchanged."""
        size = os.fstat(self._file.fileno()).st_size
        data = (json.dumps(record) + "\n").encode()
        try:
            with naming_a_full_disk(self._path, len(data)):
                if self._file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, f"no room for the record of step {record['step']}")
        except OSError:
            self._file.truncate(size)  # an incomplete line would corrupt the next line
            raise

    def close(self) -> None:
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def _set_aside(path: Path) -> None:
    """Rename an earlier run's metrics.jsonl to metrics.1.jsonl, .2, ..., so that two runs do not mix."""
    number = 1
    while (target := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)
    logger.warning("%s belonged to an earlier run; kept as %s", path, target.name)


def _remove_after(path: Path, resume_step: int) -> None:
    """Keep the lines up to step `resume_step`, and remove later lines and an incomplete last line."""
    with path.open("rb") as file:  # read twice, because a long run's lines take too much memory
        line_lengths = [len(line) if step_of(line) <= resume_step else 0 for line in _whole_lines(file)]
        if all(line_lengths):
            os.truncate(path, sum(line_lengths))
            return
        file.seek(0)
        # The file is replaced, because readers detect a new file even if it grows fast.
        write_atomic(path, compress(file, line_lengths), sum(line_lengths))


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    return takewhile(lambda line: line.endswith(b"\n"), file)


def step_of(line: bytes) -> float:
    """Return the step in a line, or infinity if the line is not a record."""
    if written := _STEP.fullmatch(line):
        return int(written[1])
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # the line is not a record, so it is removed
