"""Check the index of a bank from its first line on: which line may follow, for readers and the writer."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .errors import RESTORE, BankCorruption, BankError
from .files import FORMAT, HEAD_NAME, Head, segment_paths
from .lines import BEGIN_START, END_START, GROUP_START, PLACE, RECORD, is_sealed

_CHUNK = 1024


class Positions:
    """Stores a set of prompt positions. They are dense, so each takes about two bits."""

    def __init__(self) -> None:
        self._chunks: dict[int, int] = {}

    def add(self, position: int) -> bool:
        """Add a position and return whether it is new."""
        chunk, bit = divmod(position, _CHUNK)
        before = self._chunks.get(chunk, 0)
        self._chunks[chunk] = before | 1 << bit
        return not before >> bit & 1

    def all(self) -> set[int]:
        return {c * _CHUNK + b for c, bits in self._chunks.items() for b in range(_CHUNK) if bits >> b & 1}


@dataclass(frozen=True, slots=True)
class Place:
    """Contains offset and size of a group's blob in its segment's .bin."""

    offset: int
    size: int


class Ledger:
    """Accepts complete lines in order, segment by segment. Raises `BankCorruption` for a line that cannot follow."""

    def __init__(self, directory: Path):
        self._directory = directory
        self.positions = Positions()
        self.chain = 0  # running crc32 of all lines
        self.total_groups = 0
        # State of the segment that is being read:
        self.segment = 0
        self.lines = 0
        self.index_size = 0  # bytes of complete lines
        self.data_size = 0  # bytes of the groups' blobs
        self.groups = self.dropped = 0
        self.ended = False

    @property
    def index_path(self) -> Path:
        return segment_paths(self._directory, self.segment)[1]

    @property
    def data_path(self) -> Path:
        return segment_paths(self._directory, self.segment)[0]

    def add(self, line: bytes) -> Place | None:
        """Check the next line, newline included, and return the place of its blob if the line is a group's.

        Raises `BankError` for a bank of format 1, because lines of that format have no crc32.
        """
        old = self.segment == 0 and self.lines == 0 and RECORD.match(line) and not is_sealed(line)
        if old and not (self._directory / HEAD_NAME).exists():
            raise BankError(
                f"{self._directory}: bank format 1, this version reads only format {FORMAT}; continue the run with the "
                "version that began it, or start a new run directory"
            )
        place = self._line(line)
        self.lines += 1
        self.index_size += len(line)
        self.chain = zlib.crc32(line, self.chain)
        return place

    def next_segment(self) -> None:
        """Continue with the next segment, which must exist. Raises `BankCorruption` when this one is not finished."""
        if not self.ended:
            what = "has no line" if self.lines == 0 else f"ends with line {self.lines}"
            self._refuse_file(f"{what}, without the line that ends a finished segment, though a later one exists")
        # Old .bin files may be deleted, but the remaining ones are complete.
        stored = file_size(self.data_path)
        if stored is not None and stored != self.data_size:
            raise BankCorruption(
                f"{self.data_path}: {stored} bytes, the {self.lines} lines of {self.index_path.name} stand for "
                f"{self.data_size}; {RESTORE}"
            )
        self.segment += 1
        self.lines = self.index_size = self.data_size = self.groups = self.dropped = 0
        self.ended = False

    def contradiction(self, head: Head | None) -> str:
        """Return how the index contradicts `head`, which was read before it; empty when it does not.

        The writer makes a segment in three steps: index file with a begin line, then `head.json`, then records. So with
        self.segment = 4, the newest index file found:

        | head names | lines of segment 4 | meaning |
        |---|---|---|
        | 4 | 1 or more | normal |
        | 4 | 0 | its begin line was lost |
        | 3 | 0 or 1 | the writer has not replaced head.json yet |
        | 3 | 2 or more | head.json was replaced by an older one |
        | 5 | any | the files of segment 5 are missing |
        | no head | any | head.json is missing; only segment 0 may have none, until its first record |

        A head with `closed` also names the size and checksum of a writer's last index, which may only grow.
        """
        path = self._directory / HEAD_NAME
        if head is None:
            if self.segment == 0 and self.lines <= 1:
                return ""
            return (
                f"{path}: missing; restore it or, if no segment after {self.index_path.name} is missing too, write "
                f'{{"format": 2, "segment": {self.segment}}} into it'
            )
        if head.segment > self.segment:
            missing = segment_paths(self._directory, head.segment)[1]
            return f"{missing}: missing, though {HEAD_NAME} names it as the newest segment; {RESTORE}"
        if head.segment < self.segment:
            if head.segment == self.segment - 1 and self.lines <= 1:
                return ""
            return f"{path}: line 1: names segment {head.segment}, the newest is {self.segment}; {RESTORE}"
        if self.lines == 0:
            return f"{self.index_path}: line 1: missing or not whole; {RESTORE}"
        closed = head.closed
        if closed is None:
            return ""
        if self.index_size < closed.index:
            return (
                f"{self.index_path}: line {self.lines + 1}: missing or not whole, the writer left {closed.index} bytes "
                f"of whole lines and {self.index_size} are there; {RESTORE}"
            )
        if self.index_size == closed.index and self.chain != closed.chain:
            return f"{path}: line 1: is not of the lines that are in {self.index_path.name}; {RESTORE}"
        return ""

    def _line(self, line: bytes) -> Place | None:
        if not is_sealed(line):
            self.refuse("damaged, its crc32 is another")
        if self.ended:
            self.refuse("stands behind the line that ends the segment")
        if (self.lines == 0) != line.startswith(BEGIN_START):
            self.refuse("a segment begins with its begin line, and has one")
        if self.lines == 0:
            self._begin(line)
            return None
        if line.startswith(END_START):
            self._end(line)
            return None
        return self._record(line)

    def _begin(self, line: bytes) -> None:
        fields = json.loads(line)
        if fields.get("v") != FORMAT:
            self.refuse(f"bank format {fields.get('v')!r}, this version reads {FORMAT}")
        if fields.get("segment") != self.segment:
            self.refuse(f"begins segment {fields.get('segment')}, not {self.segment}: the file has another one's name")
        if fields.get("chain") != f"{self.chain:08x}":
            self.refuse("does not follow from the lines of the segments before: one of those files is not as it was")

    def _end(self, line: bytes) -> None:
        fields = json.loads(line)
        found = {"groups": self.groups, "dropped": self.dropped, "bytes": self.data_size}
        if differing := [f"{name} {fields.get(name)}, found {value}" for name, value in found.items()
                         if fields.get(name) != value]:  # fmt: skip
            self.refuse(f"ends the segment with {'; '.join(differing)}")
        self.ended = True

    def _record(self, line: bytes) -> Place | None:
        record = RECORD.match(line)
        if record is None:
            self.refuse("not readable")
        place = None
        if line.startswith(GROUP_START):
            found = PLACE.match(line)
            if found is None:
                self.refuse("not readable")
            place = Place(int(found[1]), int(found[2]))
            if place.offset != self.data_size:
                self.refuse(f"its blob begins at byte {place.offset}, the one before ends at {self.data_size}")
        if not self.positions.add(int(record[2])):
            self.refuse(f"prompt position {int(record[2])} is in the bank already")
        if place is None:
            self.dropped += 1
        else:
            self.data_size += place.size
            self.groups += 1
            self.total_groups += 1
        return place

    def refuse(self, why: str) -> NoReturn:
        """Raise `BankCorruption` that names the next line."""
        raise BankCorruption(f"{self.index_path}: line {self.lines + 1}: {why}; {RESTORE}")

    def _refuse_file(self, why: str) -> NoReturn:
        raise BankCorruption(f"{self.index_path}: {why}; {RESTORE}")


def file_size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
