"""Shows conversion progress on the terminal or in the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_EVERY_S = 0.2
_LINE_EVERY_S = 30.0  # a log has lines instead of a bar
Show = Callable[[Callable[[], int]], None]


@contextmanager
def shown_progress(description: str, nbytes: int) -> Iterator[Show]:
    """Yield a function that shows progress. It takes a function that returns the bytes written so far.

    On a terminal it moves a bar, at most every 0.2 s. To a log it writes a line, at most every 30 s.
    """
    console = Console(stderr=True)
    live, shown = console.is_terminal, time.monotonic()
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bars = Progress(
        TextColumn("{task.description}"), *columns, console=console, disable=not live, speed_estimate_period=600.0
    )
    task = bars.add_task(description, total=nbytes)

    def show(written: Callable[[], int]) -> None:
        nonlocal shown
        if time.monotonic() - shown < (_EVERY_S if live else _LINE_EVERY_S):
            return
        shown = time.monotonic()
        bars.update(task, completed=written())
        if not live:
            console.print(bars.get_renderable())

    with bars:
        yield show
        bars.update(task, completed=nbytes)
