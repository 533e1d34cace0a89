"""Open a bank for writing: check the whole index, and truncate records that a crash left incomplete.

Only the last segment may be incomplete, because every other segment was flushed to the device before the next began.
Bytes after the last complete line are truncated, and so are records at the end that lost data in a power failure. A
complete record is never truncated. If the last writer was closed, nothing is truncated.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from pathlib import Path
from typing import BinaryIO

from dppo_megatron.common.files import file_size

from .errors import RESTORE, BankCorruption
from .files import Closed, Head, read_up_to, segment_files, segment_numbers, split_lines
from .ledger import Ledger
from .lines import GROUP_START, starts_with_sealed, stored_entry

HEADER_LIMIT = 100_000_000  # bytes, of safetensors

log = logging.getLogger(__name__)


def recover(directory: Path) -> Ledger:
    """Truncate an incomplete end of the last segment and log that; return the state that a writer continues from.

    Raises `BankCorruption` when the directory is damaged in a way that a crash cannot explain.
    """
    head = Head.read(directory)
    newest = max(0, len(segment_numbers(directory)) - 1)
    lines, tail = split_lines(segment_files(directory, newest)[1])
    if lines and b"\0" in lines[-1]:  # a power failure lost an unflushed page of this line
        tail = lines.pop() + tail
    ledger = _read(directory, newest, lines)
    if problem := ledger.contradiction(head):
        raise BankCorruption(problem)
    closed = None if head is None or head.segment != ledger.segment else head.closed
    _refuse_tail(ledger, tail, closed)
    whole, problem = _whole_lines(ledger, lines, closed)
    named = ledger.data_size  # a power failure may remove a part of this data and leave the rest
    if whole < len(lines):
        ledger = _read(directory, newest, lines[:whole])
    elif tail:
        problem = "its index line ends early"
    _refuse_lost_lines(ledger, closed, named)
    _truncate(ledger, problem)
    return ledger


def _read(directory: Path, newest: int, last: list[bytes]) -> Ledger:
    """Read all segments' lines; `last` has the lines in segment `newest`."""
    ledger = Ledger(directory)
    for _ in range(newest):
        if ledger.read():
            ledger.refuse("its end is missing, though a later segment exists")
        ledger.next_segment()
    for line in last:
        ledger.add(line)
    return ledger


def _refuse_tail(ledger: Ledger, tail: bytes, closed: Closed | None) -> None:
    if tail and (closed or starts_with_sealed(tail)):
        ledger.refuse("damaged: it is complete except for its newline" if starts_with_sealed(tail) else "ends early")


def _whole_lines(ledger: Ledger, lines: list[bytes], closed: Closed | None) -> tuple[int, str]:
    """Return how many lines in the last segment stay, and why the next line does not."""
    stored = file_size(ledger.data_path)
    if stored is None:
        if ledger.groups:
            raise BankCorruption(
                f"{ledger.data_path}: missing, {ledger.index_name} names {ledger.groups} groups in it; {RESTORE}"
            )
        return len(lines), ""
    whole, problem = len(lines), ""
    with open(ledger.data_path, "rb", buffering=0) as data:
        for number, line in enumerate(lines, 1):
            if not line.startswith(GROUP_START):
                continue
            line_problem = _problem(ledger, line, number, data.fileno(), stored)
            if line_problem and not problem:
                whole, problem = number - 1, line_problem
            elif problem and not line_problem:
                raise BankCorruption(
                    f"{ledger.data_path}: the group of line {whole + 1} of {ledger.index_name}: {problem}, yet "
                    f"that of line {number} is whole: damaged after writing; {RESTORE}"
                )
    if problem and closed:
        raise BankCorruption(
            f"{ledger.data_path}: the group of line {whole + 1} of {ledger.index_name}: {problem}; {RESTORE}"
        )
    return whole, problem


def _problem(ledger: Ledger, line: bytes, number: int, data: int, stored: int) -> str:
    """Return why the record is incomplete; empty when it is complete."""
    entry = stored_entry(ledger.index_path, line, 0, ledger.segment, number)
    if entry.offset + entry.size > stored:
        return f"its data ends at byte {entry.offset + entry.size}, the file at {stored}"
    begin = entry.offset
    sizes, crcs = [entry.front[0], *entry.parts.flat], [entry.front[1], *entry.part_crc.flat]
    for size, crc in zip(sizes, crcs, strict=True):
        if zlib.crc32(read_up_to(data, int(size), begin).data) != crc:
            return "its data does not match its checksum"
        begin += int(size)
    return ""


def _refuse_lost_lines(ledger: Ledger, closed: Closed | None, named: int) -> None:
    """Raise `BankCorruption` if there is more data without index lines than a crash can leave: one group.

    named: bytes of data with index lines, including incomplete records that will be truncated.
    """
    stored = file_size(ledger.data_path) or 0
    if closed is not None and (ledger.index_size, stored) != (closed.index, closed.data):
        raise BankCorruption(
            f"{ledger.data_path}: {stored} bytes and {ledger.index_size} of index, the last writer left {closed.data} "
            f"and {closed.index}; {RESTORE}"
        )
    following = segment_files(ledger.directory, ledger.segment + 1)[0]
    for path, begin, allowed in ((ledger.data_path, named, 1), (following, 0, 0)):
        surplus = (file_size(path) or 0) - begin
        if surplus <= 0:
            continue
        with open(path, "rb") as data:
            data.seek(begin)
            first = _blob_size(data)
        if first is not None and surplus > allowed * first:
            raise BankCorruption(
                f"{path}: {surplus} bytes of groups for which {ledger.index_name} or its successor has no line: "
                "the index has lost lines. Restore it from a copy; or, to sample these prompts again, "
                f"`truncate -s {begin} {path}`"
            )


def _blob_size(data: BinaryIO) -> int | None:
    """Return the size of the safetensors file that begins here; None if there is no such file."""
    size = int.from_bytes(data.read(8), "little")
    if not 2 <= size <= HEADER_LIMIT:
        return None
    try:
        header = json.loads(data.read(size))
        return 8 + size + max((t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"), default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None


def _truncate(ledger: Ledger, problem: str) -> None:
    data, index = (file_size(path) or 0 for path in (ledger.data_path, ledger.index_path))
    if data == ledger.data_size and index == ledger.index_size:
        return
    log.warning(
        "%s: truncated a record that was not finished when its writer stopped (%s; %d bytes of data, %d of "
        "index); %d groups of this segment are whole",
        ledger.data_path,
        problem or "it had no index line yet",
        data - ledger.data_size,
        index - ledger.index_size,
        ledger.groups,
    )
    # The index first: a crash in between leaves surplus data, and the next opening truncates it.
    for path, size in ((ledger.index_path, ledger.index_size), (ledger.data_path, ledger.data_size)):
        if os.path.exists(path):
            with open(path, "r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())
