"""What can go wrong with a bank. Every message names the file, where in it, and what to do."""

from __future__ import annotations

from pathlib import Path

from dppo_megatron.common.files import NO_ROOM, DiskFull
from dppo_megatron.errors import ExpectedError

RESTORE = "restore it from a copy, or start a new run directory"


class BankError(ExpectedError, RuntimeError):
    """Anything wrong with a bank; the message names the file and the remedy."""


class BankLocked(BankError):
    """Another process holds the bank for writing."""


class BankWriteError(BankError):
    """A record could not be written. It was rolled back; every earlier record is intact.

    `errno` is that of the operating system, e.g. `errno.ENOSPC`.
    """

    def __init__(self, message: str, errno: int | None = None):
        super().__init__(message)
        self.errno = errno


class BankCorruption(BankError):
    """Bytes on disk contradict each other in a place that a crash while writing cannot explain."""


class BankTimeout(BankError, TimeoutError):
    """The groups waited for did not arrive, or the disk did not take one."""


def write_error(path: Path, error: OSError, needed: int) -> BankWriteError:
    """needed: bytes that were to be written."""
    why = DiskFull(path, error, needed) if error.errno in NO_ROOM else f"{path}: {error.strerror}"
    return BankWriteError(f"writing a record failed: {why}. Every record written before is intact", error.errno)


def not_accessible(path: Path, error: OSError) -> BankError:
    return BankError(
        f"{error.filename or path}: {error.strerror}; trainers read the bank and the orchestrator writes it: mend the "
        "permissions, or set run.dir to a place where this user may write"
    )
