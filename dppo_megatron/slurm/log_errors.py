"""Finds the error lines of logs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dppo_megatron.observability.logs import SERVER_START, SERVER_STOP, plain_text

SEARCHED_BYTES = 64 * 1024
# Matches the last line of a traceback, our and the servers' log levels, and messages about killed processes.
_ERROR = re.compile(
    r"^[\w.]*(Error|Exception|Timeout|Diverged|Frozen)\b|\b(ERROR|CRITICAL)\b|\bKilled\b|Segmentation fault"
)


def last_error(lines: Sequence[str]) -> str | None:
    """Return the last line that looks like an error. Errors of a server that was asked to end are ignored."""
    found, ends = None, False
    for line in lines:
        ends = SERVER_STOP in line or (ends and SERVER_START not in line)
        if not ends and _ERROR.search(line):
            found = line
    return found


class NewErrors:
    """Finds errors that appear in a run's logs from now on. Lines of earlier attempts are ignored."""

    def __init__(self, logs: Path):
        self._logs = logs
        self._sizes = {path: path.stat().st_size for path in logs.glob("*.log")}

    def first_of(self, step: str) -> str | None:
        """Return the last error line of the log of `step`, or of its rank that failed first.

        When one rank fails, the other ranks report errors later. So among the logs with errors, the failed rank's log
        has the oldest last write.
        """
        logs = [path for names in ("", "-*", ".*") for path in self._logs.glob(f"{step}{names}.log")]
        for log in sorted(logs, key=lambda path: path.stat().st_mtime):
            if (line := last_error(self._new_lines(log))) is not None:
                return f"{log.stem}: {line}"
        return None

    def _new_lines(self, log: Path) -> list[str]:
        with log.open("rb") as file:
            file.seek(max(self._sizes.get(log, 0), log.stat().st_size - SEARCHED_BYTES))
            return [plain_text(line) for line in file.read().decode("utf-8", "replace").split("\n")]
