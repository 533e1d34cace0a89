"""Lock a file exclusively; the system releases the lock when the process ends in any way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

import psutil

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # errors of file systems mounted without locks


class LockHeld(Exception):
    """Another process has the lock; the text names it.

    `ended`: that process ran on this host and has ended, so only its children have the lock.
    """

    ended = False


class FileLock(contextlib.AbstractContextManager):
    """Acquires the lock in its constructor and writes the process into the file.

    A child that inherits `descriptor` has the lock too. Raises `LockHeld` when this or another process has the lock,
    and OSError when it cannot be acquired. If `needed` is False and the file system has no locks, the file is opened
    without a lock.
    """

    def __init__(self, path: Path, *, needed: bool = True):
        self._path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            try:
                # flock, not lockf: it also excludes a second holder in the same process.
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise self.holder() from None
                if needed or error.errno not in NO_LOCKS:
                    raise
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, json.dumps(owner).encode(), 0)
        except BaseException:
            self.release()
            raise

    @staticmethod
    def is_held(path: Path) -> bool:
        """Return whether a process has the lock; False on a file system without locks. Changes no file."""
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EWOULDBLOCK, errno.EACCES) and path.exists()
        return False

    def holder(self) -> LockHeld:
        """Return an error with the process that the file names now."""
        error = LockHeld("unknown holder")
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            owner = json.loads(self._path.read_bytes()[:4096])
            error = LockHeld(f"process {owner['pid']} on {owner['host']} since {owner['since']}")
            error.ended = owner["host"] == socket.gethostname() and not psutil.pid_exists(owner["pid"])
        return error

    def release(self) -> None:
        """Release the lock. Further calls have no effect."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __exit__(self, *_: object) -> None:
        self.release()
