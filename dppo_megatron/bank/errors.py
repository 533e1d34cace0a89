"""Define the bank errors. Every message names the file, the position in the file, and the remedy."""

from __future__ import annotations

from pathlib import Path

from dppo_megatron.common.files import NO_ROOM, disk_full
from dppo_megatron.errors import ExpectedError

RESTORE = "restore it from a copy, or start a new run directory"


class BankError(ExpectedError, RuntimeError):
    """The bank has a problem; the message names the file and the remedy."""


class BankLocked(BankError):
    """Another process has the bank open for writing."""


class BankWriteError(BankError):
    """Writing a record failed; every earlier record is intact.

    The record was rolled back, unless only flushing the index line failed. `errno` is the operating system's error
    number, e.g. `errno.ENOSPC`.
    """

    def __init__(self, message: str, errno: int | None = None):
        super().__init__(message)
        self.errno = errno


class BankCorruption(BankError):
    """Bytes on disk contradict each other in a way that a crash during a write cannot explain."""


class BankTimeout(BankError, TimeoutError):
    """The expected groups did not arrive, or the disk did not accept a group."""


def write_error(path: Path, error: OSError, needed: int) -> BankWriteError:
    """Return the error for a failed write of `needed` bytes."""
    reason = disk_full(path, error, needed) if error.errno in NO_ROOM else f"{path}: {error.strerror}"
    return BankWriteError(f"writing a record failed: {reason}. Every record written before is intact", error.errno)


def not_accessible(path: Path, error: OSError) -> BankError:
    return BankError(
        f"{error.filename or path}: {error.strerror}; trainers read the bank and the orchestrator writes it: correct "
        "the permissions, or set run.dir to a place where this user may write"
    )
