"""Lock a bank for its only writer, with a file that is locked until its process ends."""

from __future__ import annotations

import os
from pathlib import Path

from dppo_megatron.common.file_lock import NO_LOCKS, FileLock, LockHeld

from .errors import BankError, BankLocked, not_accessible

LOCK_NAME = "writer.lock"


class WriterLock(FileLock):
    """Takes the lock when created. Raises `BankLocked` when another writer, in this or another process, has it."""

    def __init__(self, directory: Path):
        path = directory / LOCK_NAME
        try:
            super().__init__(path)
        except LockHeld as held:
            raise BankLocked(
                f"{directory}: another process is writing this bank: {held}. Stop it first, or use another run.dir"
            ) from None
        except OSError as error:
            if error.errno in NO_LOCKS:
                raise BankError(
                    f"{path}: cannot lock ({error.strerror}); is the file system mounted without locks?"
                ) from error
            raise not_accessible(path, error) from error

    def check(self) -> None:
        """Raise `BankLocked` when the file was deleted or replaced, because another writer may have taken the bank."""
        held = os.fstat(self.descriptor)
        try:
            found = os.stat(self._path)
            if (held.st_dev, held.st_ino) == (found.st_dev, found.st_ino):
                return
            why = f"is another file now, of {self.holder()}"
        except FileNotFoundError:
            why = "is gone"
        except OSError as error:
            why = f"cannot be looked at: {error.strerror}"
        raise BankLocked(
            f"{self._path}: {why}, though this process holds the bank; it writes nothing more. Every record written "
            "before is intact; make sure that no other orchestrator runs, then resume"
        )
