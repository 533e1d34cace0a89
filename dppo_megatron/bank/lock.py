"""The lock of a bank's one writer: a file that is locked until its process ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from .errors import BankError, BankLocked, not_accessible

LOCK_NAME = "writer.lock"


class WriterLock:
    """Taken when made. Raises `BankLocked` when another writer, in this process or any, has it."""

    def __init__(self, directory: Path):
        self._path = directory / LOCK_NAME
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise not_accessible(self._path, error) from error
        try:
            self._take()
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raises `BankLocked` when the file was deleted or replaced: another writer may have taken the bank."""
        held = os.fstat(self._descriptor)
        try:
            found = os.stat(self._path)
            if (held.st_dev, held.st_ino) == (found.st_dev, found.st_ino):
                return
            why = f"is another file now, of {_describe_holder(self._path.read_bytes()[:4096])}"
        except FileNotFoundError:
            why = "is gone"
        except OSError as error:
            why = f"cannot be looked at: {error.strerror}"
        raise BankLocked(
            f"{self._path}: {why}, though this process holds the bank; it writes nothing more. Every record written "
            "before is intact; make sure that no other orchestrator runs, then resume"
        )

    def release(self) -> None:
        """Harmless when repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _take(self) -> None:
        try:
            # flock, not lockf: it also excludes a second writer in the same process.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise BankError(
                    f"{self._path}: cannot lock ({error.strerror}); is the file system mounted without locks?"
                ) from error
            raise BankLocked(
                f"{self._path.parent}: another process is writing this bank: "
                f"{_describe_holder(os.pread(self._descriptor, 4096, 0))}. Stop it first, or use another run.dir"
            ) from None
        this_process = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(this_process).encode(), 0)
        except OSError as error:
            raise not_accessible(self._path, error) from error


def _describe_holder(text: bytes) -> str:
    try:
        holder: dict[str, Any] = json.loads(text)
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "unknown holder"
