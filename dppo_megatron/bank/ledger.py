"""Check, for readers and the writer, that each line in a bank index may follow the previous lines."""

from __future__ import annotations

import os
import zlib
from array import array
from pathlib import Path
from typing import NoReturn

from pydantic_core import from_json

from dppo_megatron.common.files import file_size

from .errors import RESTORE, BankCorruption, BankError
from .files import FORMAT, HEAD_NAME, Head, segment_files
from .lines import BEGIN_START, END_START, GROUP_START, PLACE, RECORD, is_sealed

_CHUNK = 1024


class Positions:
    """Stores a set of prompt positions. The positions are dense, so each takes about two bits."""

    def __init__(self) -> None:
        self._chunks: dict[int, int] = {}

    def add(self, position: int) -> bool:
        """Add a position and return whether it is new."""
        chunk, bit = divmod(position, _CHUNK)
        bits = self._chunks.get(chunk, 0)
        self._chunks[chunk] = bits | 1 << bit
        return not bits >> bit & 1

    def to_set(self) -> set[int]:
        return {c * _CHUNK + b for c, bits in self._chunks.items() for b in range(_CHUNK) if bits >> b & 1}


class Ledger:
    """Accepts complete lines in order, segment by segment. Raises `BankCorruption` for a line that cannot follow.

    Keeps 40 bytes per group, in the arrays `rows` (lines in the prompt file), and `segments`, `line_numbers`, `offsets`
    and `sizes` for the index lines.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.positions = Positions()
        self.chain = 0  # running crc32 of all lines
        self.line_numbers, self.offsets, self.sizes = array("l"), array("q"), array("l")
        self.rows, self.segments = array("q"), array("l")
        # State in the current segment:
        self.segment = 0
        self.data_path, self.index_path = segment_files(directory, 0)
        self.lines = 0
        self.index_size = 0  # bytes of complete lines
        self.data_size = 0  # bytes of all blobs
        self.groups = self.dropped = 0
        self.ended = False

    @property
    def index_name(self) -> str:
        return os.path.basename(self.index_path)

    def read(self) -> bytes:
        """Add the new complete lines in the segment's index; return the bytes after these lines. Raises OSError.

        Opens the file each time, because network file systems revalidate their caches on open.
        """
        with open(self.index_path, "rb", buffering=0) as file:
            if file.seek(0, os.SEEK_END) < self.index_size:
                raise BankCorruption(
                    f"{self.index_path}: shorter than when last read: records that were in use are gone; "
                    "restart the trainer from its last checkpoint"
                )
            file.seek(self.index_size)
            *lines, tail = file.read().split(b"\n")
        for line in lines:
            self.add(line + b"\n")
        return tail

    def add(self, line: bytes) -> None:
        """Check the next line, newline included. Raises `BankError` for bank format 1, which has no crc32s."""
        old = self.segment == 0 and self.lines == 0 and RECORD.match(line) and not is_sealed(line)
        if old and not (self.directory / HEAD_NAME).exists():
            raise BankError(
                f"{self.directory}: bank format 1, this version reads only format {FORMAT}; continue the run with the "
                "version that began it, or start a new run directory"
            )
        self._line(line)
        self.lines += 1
        self.index_size += len(line)
        self.chain = zlib.crc32(line, self.chain)

    def next_segment(self) -> None:
        """Continue with the next segment, which must exist. Raises `BankCorruption` if this segment is unfinished."""
        if not self.ended:
            tail = "has no line" if self.lines == 0 else f"ends with line {self.lines}"
            raise BankCorruption(
                f"{self.index_path}: {tail}, without the line that ends a finished segment, though a later one exists; "
                f"{RESTORE}"
            )
        # Old .bin files may be deleted, but the remaining files are complete.
        stored = file_size(self.data_path)
        if stored is not None and stored != self.data_size:
            raise BankCorruption(
                f"{self.data_path}: {stored} bytes, the {self.lines} lines of {self.index_name} describe "
                f"{self.data_size}; {RESTORE}"
            )
        self.segment += 1
        self.data_path, self.index_path = segment_files(self.directory, self.segment)
        self.lines = self.index_size = self.data_size = self.groups = self.dropped = 0
        self.ended = False

    def contradiction(self, head: Head | None) -> str:
        """Return how the index contradicts `head`, or an empty string. `head` must be read before the index.

        The writer makes a segment in three steps: index file with a begin line, then `head.json`, then records. So with
        self.segment = 4, the newest index file found:

        | head names | lines of segment 4 | meaning |
        |---|---|---|
        | 4 | 1 or more | normal |
        | 4 | 0 | the begin line was lost |
        | 3 | 0 or 1 | the writer has not replaced head.json yet |
        | 3 | 2 or more | an older head.json replaced the newest |
        | 5 | any | the files of segment 5 are missing |
        | no head | any | head.json is missing; only segment 0 may have none, until the first record |

        A head with `closed` also names the size and checksum of a writer's last index. This index may only grow.
        """
        path = self.directory / HEAD_NAME
        if head is None:
            if self.segment == 0 and self.lines <= 1:
                return ""
            return (
                f"{path}: missing; restore it or, if no segment after {self.index_name} is missing too, write "
                f'{{"format": 2, "segment": {self.segment}}} into it'
            )
        if head.segment > self.segment:
            missing = segment_files(self.directory, head.segment)[1]
            return f"{missing}: missing, though {HEAD_NAME} names it as the newest segment; {RESTORE}"
        if head.segment < self.segment:
            if head.segment == self.segment - 1 and self.lines <= 1:
                return ""
            return f"{path}: line 1: names segment {head.segment}, the newest is {self.segment}; {RESTORE}"
        if self.lines == 0:
            return f"{self.index_path}: line 1: missing or incomplete; {RESTORE}"
        closed = head.closed
        if closed is None:
            return ""
        if self.index_size < closed.index:
            return (
                f"{self.index_path}: line {self.lines + 1}: missing or incomplete, the writer left {closed.index} "
                f"bytes of complete lines, found {self.index_size}; {RESTORE}"
            )
        if self.index_size == closed.index and f"{self.chain:08x}" != closed.chain:
            return f"{path}: line 1: does not belong to the lines of {self.index_name}; {RESTORE}"
        return ""

    def _line(self, line: bytes) -> None:
        if not is_sealed(line):
            self.refuse("damaged: its crc32 does not match")
        if self.ended:
            self.refuse("follows the line that ends the segment")
        if (self.lines == 0) != line.startswith(BEGIN_START):
            self.refuse("a segment begins with its begin line, and has one")
        if self.lines == 0:
            self._begin(line)
        elif line.startswith(END_START):
            self._end(line)
        else:
            self._record(line)

    def _begin(self, line: bytes) -> None:
        fields = from_json(line)
        if fields.get("v") != FORMAT:
            self.refuse(f"bank format {fields.get('v')!r}, this version reads {FORMAT}")
        if fields.get("segment") != self.segment:
            self.refuse(f"begins segment {fields.get('segment')}, but the file has the name of segment {self.segment}")
        if fields.get("chain") != f"{self.chain:08x}":
            self.refuse("does not follow from the earlier segments: one of their files was changed")

    def _end(self, line: bytes) -> None:
        fields = from_json(line)
        counts = {"groups": self.groups, "dropped": self.dropped, "bytes": self.data_size}
        if differing := [f"{name} {fields.get(name)}, found {value}" for name, value in counts.items()
                         if fields.get(name) != value]:  # fmt: skip
            self.refuse(f"ends the segment with {'; '.join(differing)}")
        self.ended = True

    def _record(self, line: bytes) -> None:
        record, place = RECORD.match(line), PLACE.match(line)
        if record is None or (place is None and line.startswith(GROUP_START)):
            self.refuse("not readable")
        if place is not None and int(place[1]) != self.data_size:
            self.refuse(f"its blob begins at byte {int(place[1])}, the one before ends at {self.data_size}")
        if not self.positions.add(int(record[2])):
            self.refuse(f"prompt position {int(record[2])} is in the bank already")
        if place is None:
            self.dropped += 1
        else:
            self.data_size += int(place[2])
            self.groups += 1
            self.line_numbers.append(self.lines + 1)
            self.offsets.append(self.index_size)
            self.sizes.append(len(line))
            self.rows.append(int(record[3]))
            self.segments.append(self.segment)  # last, because another thread may read as many groups

    def refuse(self, reason: str) -> NoReturn:
        """Raise `BankCorruption` that names the next line."""
        raise BankCorruption(f"{self.index_path}: line {self.lines + 1}: {reason}; {RESTORE}")
