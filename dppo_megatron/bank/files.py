"""Read and write the bank files: numbered segments, the writer's lock, and `head.json` with the newest segment."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import psutil
from pydantic import ConfigDict, ValidationError

from dppo_megatron.common.files import adapter, write_atomic

from .errors import RESTORE, BankCorruption, not_accessible

FORMAT: Literal[2] = 2
HEAD_NAME = "head.json"
# On these file systems, every other process sees a process's writes at once and in order.
LOCAL_FILE_SYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay", "apfs"})
_HINT_BYTES = 128 << 10  # Linux honors only the start of a longer hint: the read-ahead size, by default this value
_BUFFER_BYTES = 32 << 20  # address space; only pages that were used take memory
_ALIGNED = 64  # bytes
_INDEX_NAME = re.compile(r"segment-(\d{6}|[1-9]\d{6,17})\.jsonl", re.ASCII)


def segment_paths(directory: Path, number: int) -> tuple[Path, Path]:
    """Return the paths (.bin, .jsonl) of a segment."""
    data, index = segment_files(directory, number)
    return Path(data), Path(index)


def segment_files(directory: Path, number: int) -> tuple[str, str]:
    """Return `segment_paths` as strings, in a tenth of the time; used where every segment is opened."""
    stem = f"{directory}/segment-{number:06d}"
    return f"{stem}.bin", f"{stem}.jsonl"


def segment_numbers(directory: Path) -> list[int]:
    """Return the numbers of all segments with an index file, ascending; files with other names are ignored.

    Raises `BankCorruption` when a number in between is missing.
    """
    numbers = sorted(int(m[1]) for m in map(_INDEX_NAME.fullmatch, os.listdir(directory)) if m)
    if numbers != list(range(len(numbers))):
        missing = min(set(range(len(numbers))) - set(numbers))
        raise BankCorruption(
            f"{segment_paths(directory, missing)[1]}: missing, though later segments exist. Index files are "
            f"the prompt cursor and must not be deleted; {RESTORE}"
        )
    return numbers


@dataclass(frozen=True, slots=True)
class Closed:
    """Contains sizes and checksum from a cleanly closed writer. All this data is on the device and must exist."""

    index: int  # bytes of the last segment's .jsonl
    data: int  # bytes of the last segment's .bin
    chain: str  # running crc32 of all lines, 8 hexadecimal digits


@dataclass(frozen=True, slots=True)
class Head:
    """Represents `head.json`, replaced when a segment begins, a writer closes and the next writer opens."""

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid"}

    format: Literal[2]
    segment: int  # the newest segment
    closed: Closed | None = None

    def write(self, directory: Path) -> None:
        """Write the file atomically. Raises OSError."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        write_atomic(directory / HEAD_NAME, json.dumps(fields) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Head | None:
        """Read the file; return None if it is missing. Raises `BankCorruption` for content that no writer wrote."""
        path = directory / HEAD_NAME
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise not_accessible(path, error) from error
        try:
            return adapter(cls).validate_json(content, strict=True)  # type: ignore[arg-type]  # as in `parse_as`
        except ValidationError:
            raise BankCorruption(f"{path}: line 1: no writer of this version wrote this content; {RESTORE}") from None


class ReadBuffer:
    """Provides memory for reads; `reuse` makes the memory available again.

    The system clears every page of new memory. This takes longer than copying a page from the cache.
    """

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._end = 0

    def take(self, size: int) -> np.ndarray:
        """Return [size] uint8. The array belongs to the caller until `reuse`."""
        begin = self._end
        if begin + size > len(self._bytes):  # earlier arrays keep their memory
            begin, self._bytes = 0, np.empty(max(size, 2 * len(self._bytes), _BUFFER_BYTES), np.uint8)
        self._end = begin + -(-size // _ALIGNED) * _ALIGNED
        return self._bytes[begin : begin + size]

    def reuse(self) -> None:
        """Invalidate earlier arrays: later arrays reuse their memory."""
        self._end = 0


def read_up_to(file: int, size: int, offset: int, buffer: ReadBuffer | None = None) -> np.ndarray:
    """Return `size` bytes of a file from `offset` as uint8, fewer at the file end.

    A system call may return less than requested, and never more than 2 GiB.
    """
    array = np.empty(size, np.uint8) if buffer is None else buffer.take(size)
    num_read = 0
    while num_read < size and (count := os.preadv(file, [array.data[num_read:]], offset + num_read)):
        num_read += count
    return array[:num_read]


def prefetch(file: int, begin: int, end: int) -> None:
    """Ask the system to cache bytes [begin, end) of a file, if it supports such hints; do not wait.

    Raises OSError when a file system rejects the hint.
    """
    if hasattr(os, "posix_fadvise"):
        for start in range(begin, end, _HINT_BYTES):
            os.posix_fadvise(file, start, min(_HINT_BYTES, end - start), os.POSIX_FADV_WILLNEED)


def split_lines(path: str | Path) -> tuple[list[bytes], bytes]:
    """Return an index file's lines that end with a newline, and the bytes after these lines."""
    content = Path(path).read_bytes() if os.path.exists(path) else b""
    end = content.rfind(b"\n") + 1
    return [line + b"\n" for line in content[:end].split(b"\n")[:-1]], content[end:]


def is_local(directory: Path) -> bool:
    place = directory.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if place.is_relative_to(m.mountpoint)]
    # The longest mount point is the nearest; among equal mount points, the last hides the others.
    nearest = max(enumerate(mounts), key=lambda m: (len(m[1].mountpoint), m[0]), default=None)
    return nearest is not None and nearest[1].fstype in LOCAL_FILE_SYSTEMS
