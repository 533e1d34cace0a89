"""The two ways `console.ProgressView` draws: plain lines, or a bar that redraws in place."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


class PlainView:
    """One line after the other, flushed, in whatever encoding the stream has."""

    def __init__(self, stream: TextIO, interval_s: float):
        self._stream = stream
        self._interval_s = interval_s
        self._last: float | None = None

    def line(self, text: str) -> None:
        """Writes a line that stays."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()

    def step_line(self, text: str, at: float, last: bool) -> None:
        """Writes a step's line unless one was written less than the interval before; the last step always.

        A step of an earlier time is written too: a resumed run went back.
        """
        if last or self._last is None or not 0 <= at - self._last < self._interval_s:
            self._last = at
            self.line(text)

    def show(self, step: int, total: int, left: str, values: str) -> None:
        """Nothing: plain output has no place that redraws."""

    def close(self) -> None:
        self._stream.flush()


class LiveView:
    """Two lines at the bottom of the terminal, all else scrolls above. Draws in its calls only: no thread."""

    def __init__(self, stream: TextIO):
        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()

    def show(self, step: int, total: int, left: str, values: str) -> None:
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=total, completed=step)
        head.add_row(Text(f"step {step}/{total}", "bold"), bar, Text(left, "cyan"))
        self._live.update(Group(head, Text(values)), refresh=True)

    def step_line(self, text: str, at: float, last: bool) -> None:
        """Nothing: the bar already shows the step."""

    def line(self, text: str) -> None:
        self._console.print(Text(text))

    def close(self) -> None:
        self._live.stop()
