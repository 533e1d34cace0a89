"""Shows the progress of a conversion on the terminal or in the log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

_EVERY_S = 0.2
_LINE_EVERY_S = 30.0  # a log has lines instead of a bar


class Progress:
    """Shows a bar on a terminal or a line at intervals in a log. If silent it shows nothing. A context manager."""

    def __init__(self, what: str, nbytes: int, *, silent: bool = False):
        self._what, self._nbytes, self._silent = what, nbytes, silent
        self._started = self._shown = time.monotonic()
        self._first: int | None = None  # written before this process began
        self._bars: Bars | None = None
        if not silent and sys.stderr.isatty():
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bars = Bars(TextColumn("{task.description}"), *columns, console=Console(stderr=True))
            self._task = self._bars.add_task(what, total=nbytes)

    def show(self, written: Callable[[], int]) -> None:
        """Show the bytes that `written` returns, at most every few seconds."""
        now = time.monotonic()
        if self._silent or now - self._shown < (_EVERY_S if self._bars else _LINE_EVERY_S):
            return
        self._shown = now
        done = written()
        if self._bars:
            self._bars.update(self._task, completed=done)
            return
        if self._first is None:
            self._first = done
            return
        rate = max(done - self._first, 1) / (now - self._started)
        left = max(self._nbytes - done, 0) / rate
        print(
            f"{self._what}: {done / 1e9:.2f} of {self._nbytes / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s, "
            f"about {left:.0f} s left",
            file=sys.stderr,
        )

    def __enter__(self) -> Progress:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._bars:
            if kind is None:
                self._bars.update(self._task, completed=self._nbytes)
            self._bars.stop()
