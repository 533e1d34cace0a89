"""Write small files and directories so that readers see all of them or nothing, even after a power failure.

A file is written under another name, flushed to the device and renamed. Then the directory, which contains the new
name, is flushed. Without the first flush, a power failure may keep the new name but lose the bytes, and the file is
empty.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from typing_extensions import Buffer

from dppo_megatron.errors import ExpectedError, shown

FLUSH_BYTES = 128 << 20

_REMEDY = "restore it, or remove it if the run does not continue"
_LFS_POINTER = b"version https://git-lfs"
_MAX_BYTES = 64 << 20  # a file may name every tensor of a model with hundreds of thousands of tensors


T = TypeVar("T")


LFS_PROBLEM = "a Git LFS pointer, not the file; `git lfs pull` in its repository fetches it"


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file only names the content that Git LFS stores elsewhere."""
    with path.open("rb") as opened:
        return opened.read(len(_LFS_POINTER)) == _LFS_POINTER


class DamagedFile(ExpectedError, ValueError):
    """A file of a run has content that no run writes."""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class DiskFull(ExpectedError, OSError):
    """A file system or quota has no space; the message gives the free space and the remedy."""


def disk_full(path: Path, error: OSError, needed: int) -> DiskFull:
    """Return the error for a write to `path` that needs at least `needed` bytes."""
    disk, remedy = path.parent.absolute(), "Free space there or move run.dir to a larger file system, then resume"
    free = f"{shutil.disk_usage(disk).free} bytes free in {disk}, at least {needed} needed"
    return DiskFull(error.errno, f"{path}: {error.strerror}; {free}. {remedy}")


@contextmanager
def naming_a_full_disk(path: Path, needed: int) -> Iterator[None]:
    """Raise `DiskFull` instead of OSError when a write lacks space."""
    try:
        yield
    except OSError as error:
        raise (disk_full(path, error, needed) if error.errno in NO_ROOM else error) from None


class OutputError(ExpectedError, OSError):
    """A file or directory that a command must write cannot be written."""


def output(path: Path, option: str = "--out", *, directory: bool = False) -> Path:
    """Return the path that a command writes, with symbolic links resolved. Creates missing directories.

    Raises `OutputError` naming `option` if the path cannot be written, for example because a pipe has that name.
    """
    resolved = Path(os.path.realpath(path))
    place = resolved if directory else resolved.parent
    probe = place / f".{resolved.name}.{os.getpid()}.tmp"  # the temporary name in `write_atomic`
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not directory and resolved.exists() and not resolved.is_file():
            raise OSError(errno.EEXIST, "a directory, a device or a pipe")  # a rename would replace it
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(f"{option} = {path}: cannot be written: {error.strerror}; give another") from None
    return resolved


def numbered_directory(parent: Path, name: str, resume: bool = False, option: str = "run.dir") -> Path:
    """Create and return the next directory of NAME-1, NAME-2, ... in `parent`; with `resume`, return the newest.

    Only the owner can read the directory, because engines may register in it. With `resume` and no such directory,
    NAME-1 is created. Raises `OutputError` naming `option`.
    """
    output(parent, option, directory=True)
    numbers = [int(m[1]) for path in parent.iterdir() if (m := re.fullmatch(re.escape(name) + r"-(\d+)", path.name))]
    number = max(numbers, default=0)
    while not (resume and numbers):
        number += 1
        with suppress(FileExistsError):
            (parent / f"{name}-{number}").mkdir(mode=0o700)
            break
    return parent / f"{name}-{number}"


def write_atomic(path: Path, content: str | bytes | Iterator[bytes], size: int = 0) -> None:
    """Write or replace a file in an existing directory. If writing raises OSError, the old file is unchanged.

    size: bytes of `content` if it is an iterator over parts, for the message about a full disk.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    parts, size = ([data], len(data)) if isinstance(data, bytes) else (data, size)
    try:
        with naming_a_full_disk(path, size), aside.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Write a JSON value with `write_atomic`; create the directory if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(value, indent=indent))


def append_json_line(path: Path, record: Any) -> None:
    """Append a JSON value to a file as a line; create the file if it is missing."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file that `write_json` wrote, None without a file. Raises `DamagedFile`."""
    return _or_damaged(read_foreign_json, path)


def read_as(kind: type[T], path: Path) -> T | None:
    """Return the dataclass with the fields that `write_json` wrote, None without a file. Raises `DamagedFile`."""
    content = _or_damaged(read_regular, path)
    return None if content is None else parse_as(kind, content, path)


def _or_damaged(reader: Callable[[Path], T], path: Path) -> T | None:
    try:
        return reader(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedFile(f"{path}: {error}; {_REMEDY}") from None


@cache
def adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return the cached validator of a type; creating one takes milliseconds."""
    return TypeAdapter(kind)


def parse_as(kind: type[T], content: bytes, source: object) -> T:
    """Return the dataclass with the fields in JSON `content`. Raises `DamagedFile` naming the source and the field."""
    try:
        # typeshed: a function with lru_cache does not accept type[T].
        return adapter(kind).validate_json(content, strict=True)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the whole"
        raise DamagedFile(f"{source}: {field} is {shown(first['input'])}: {first['msg']}; {_REMEDY}") from None


def read_foreign_json(path: Path) -> dict[str, Any]:
    """Return the object in a file that another program wrote.

    Raises FileNotFoundError, and `ValueError` for any other problem.
    """
    try:
        value = json.loads(read_regular(path).decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(LFS_PROBLEM if is_lfs_pointer(path) else f"not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"the top level must be an object, found {type(value).__name__}")
    return value


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; use as `object_pairs_hook`. Raises `ValueError` if a key is repeated."""
    members = dict(pairs)
    if len(members) < len(pairs):
        ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(repeated)} is given twice")
    return members


def is_irregular(path: str | Path) -> bool:
    """Return whether a path is a pipe, a device, a directory or a link to nothing; False if it does not exist."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return os.path.islink(path)


def read_regular(path: Path, limit_bytes: int = _MAX_BYTES) -> bytes:
    """Return a file's content, at most `limit_bytes`.

    Raises FileNotFoundError, and `ValueError` for any other problem, such as a longer file. Pipes and devices are
    rejected, because reading them may not end.
    """
    try:
        if is_irregular(path):
            raise ValueError("not a regular file")
        with path.open("rb") as file:
            content = file.read(limit_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    if len(content) > limit_bytes:
        raise ValueError(f"more than {limit_bytes >> 20} MiB")
    return content


def file_size(path: str | Path) -> int | None:
    """Return a file's bytes, None without a file."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def sync(path: Path) -> None:
    """Flush a file's bytes, or the names in a directory, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Flush all files and names in `directory` to the device."""
    for inside, _, files in os.walk(directory):
        for name in ("", *files):
            sync(Path(inside, name))


def replace_directory(source: Path, target: Path, *, durable: bool = True) -> None:
    """Rename the flushed directory `source` to `target` on the same file system.

    An existing target is first renamed to .NAME.replaced, and removed after `source` is renamed. durable: whether the
    new name is flushed to the device before the removal.
    """
    aside = target.with_name(f".{target.name}.replaced")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    source.rename(target)
    if durable:
        sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


class SteadyFile(BufferedWriter):
    """Flushes the written bytes to the device every `FLUSH_BYTES`, and then calls `moved`.

    Otherwise the system writes all bytes at once at the end, and a slow device looks like a dead device. If `durable`
    is False, no bytes are flushed, for files that may be lost in a machine crash.
    """

    def __init__(self, path: Path, moved: Callable[[], None], *, durable: bool = True):
        super().__init__(FileIO(path, "wb"))
        self._path, self._moved, self._durable = path, moved, durable
        self._pending = 0
        self._full: DiskFull | None = None  # torch's writer raises another error instead

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data)
        for first in range(0, len(view), FLUSH_BYTES):
            try:
                with naming_a_full_disk(self._path, len(view) - first):
                    self._pending += super().write(view[first : first + FLUSH_BYTES])
            except DiskFull as error:
                self._full = error
                raise
            if self._pending >= FLUSH_BYTES:
                self.sync()
        return len(view)

    def sync(self) -> None:
        with naming_a_full_disk(self._path, self._pending):
            self.flush()
            if self._durable:
                os.fsync(self.fileno())
        self._pending = 0
        self._moved()

    def close(self) -> None:
        """Close the file. If it is durable, every byte is on the device."""
        if not self.closed:
            try:
                self.sync()
            finally:
                super().close()

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            try:
                super().close()
            finally:
                if self._full is not None:
                    raise self._full
