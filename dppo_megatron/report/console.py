"""Shows run progress: a bar in a terminal, plain lines in a log file."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .heldout import describe, heldout_scores, score_format
from .logs import duration, plain_text
from .names import evaluated_sets, is_step_record
from .tail import JsonlFollower, sparse

Record = Mapping[str, Any]


COLUMNS = (  # metric, label, width, format, unit
    ("train/loss", "loss ", 9, ".2e", ""),
    ("rollout/reward_mean", "reward ", 6, ".3f", ""),
    ("environment/turns_mean", "turns ", 4, ".1f", ""),
    ("environment/calls_mean", "calls ", 4, ".1f", ""),
    ("environment/call_errors_mean", "call errors ", 4, ".1f", ""),
    ("policy/masked_share", "masked ", 6, ".2%", ""),
    ("mismatch/kl", "mismatch ", 8, ".1e", ""),
    ("throughput/tokens_per_s", "", 7, ",.0f", " tok/s"),
    ("throughput/mfu", "MFU ", 5, ".1%", ""),
    ("time/step_s", "", 6, ".1f", " s/step"),
)
_CHANGING = ("train/loss", "rollout/reward_mean")  # a terminal also shows the change since the first step
_PACE_STEPS = 20  # number of last steps that predict the time left
_REDRAW_S = 1.0  # the countdown moves even without new records


class PlainView:
    """Prints lines in the stream encoding, and flushes after each line."""

    def __init__(self, stream: TextIO, interval_s: float):
        self._stream = stream
        self._interval_s = interval_s
        self._last: float | None = None

    def line(self, text: str) -> None:
        """Write one line."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()

    def step_line(self, text: str, at: float, last: bool) -> None:
        """Write a step line if the interval has passed, this is the last step, or a resumed run repeats steps."""
        if last or self._last is None or not 0 <= at - self._last < self._interval_s:
            self._last = at
            self.line(text)

    def show(self, step: int, total: int, left: str, values: Sequence[str]) -> None:
        """Do nothing, because plain output cannot redraw."""

    def close(self) -> None:
        self._stream.flush()


class LiveView:
    """Redraws two lines at the bottom of the terminal; other lines scroll above. Starts no thread."""

    def __init__(self, stream: TextIO):
        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()

    def show(self, step: int, total: int, left: str, values: Sequence[str]) -> None:
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=total, completed=step)
        head.add_row(Text(f"step {step}/{total}", "bold"), bar, Text(left, "cyan"))
        fixed = "  ".join(value.replace(" ", "\0") for value in values)  # keeps name and value on one line
        lines = textwrap.fill(fixed, self._console.width, break_on_hyphens=False)
        self._live.update(Group(head, Text(lines.replace("\0", " "))), refresh=True)

    def step_line(self, text: str, at: float, last: bool) -> None:
        """Do nothing, because the bar already shows the step."""

    def line(self, text: str) -> None:
        self._console.print(Text(text))

    def close(self) -> None:
        self._live.stop()


class ProgressView:
    """Shows the records that a trainer appends to metrics.jsonl. `close` restores the terminal.

    A terminal shows two lines: a bar with the time left, and the latest values. Other outputs (a Slurm log, CI) get
    plain lines without control codes, at most one step line every `plain_interval_s`. Each evaluation is printed on a
    separate line. `samples` is the number of samples in a step. If output fails (a closed pipe), the view is disabled
    and the run continues.
    """

    def __init__(
        self, total_steps: int, stream: TextIO | None = None, plain_interval_s: float = 10.0, samples: int = 0
    ):
        out = sys.stdout if stream is None else stream
        interactive = out.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        self._view: LiveView | PlainView | None = LiveView(out) if interactive else PlainView(out, plain_interval_s)
        self._total, self._samples = total_steps, samples
        self._follower: JsonlFollower | None = None
        self._latest: Record = {}
        self._first: Record = {}
        self._sampled: dict[int, dict[str, Any]] = {}  # step -> COLUMNS values from the orchestrator
        self._evals: dict[int, dict[str, Any]] = {}
        self._pace: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS + 1)  # step, record time
        self._drawn_at = 0.0
        self._refresh()

    def poll(self, path: str | Path) -> bool:
        """Show the records appended to `path` since the last call, and return whether there were any.

        An idle call costs less than 1 ms. Records found on the first call, or when a resumed run has rewritten the
        file, only update the bar.
        """
        first = self._follower is None
        self._follower = self._follower or JsonlFollower(path, sparse)
        new_records, restarted = self._follower.poll()
        restarted = restarted or first
        records = [record for record in new_records if "step" in record and "time" in record]
        if restarted:
            self._evals.clear()
            for record in records:
                self._absorb(record)
            self._pace.clear()  # an earlier attempt does not predict the pace of this attempt
        for record in [] if restarted else records:
            self.update(record)
        if records or time.monotonic() - self._drawn_at > _REDRAW_S:
            self._refresh()
        return bool(records)

    def update(self, record: Record) -> None:
        """Show one record."""
        self._absorb(record)
        step, at = int(record["step"]), float(record["time"])
        if is_step_record(record):
            line = self._step_line(self._latest, step, at)
            self._draw(lambda view: view.step_line(line, at, step >= self._total))
            self._refresh()
        for name in evaluated_sets(record):
            self._draw(methodcaller("line", self._eval_line(step, name, record)))

    def note(self, text: str) -> None:
        """Show a launcher message above the bar, without control codes."""
        for line in map(plain_text, text.splitlines()):
            self._draw(methodcaller("line", line))

    def close(self) -> None:
        self._refresh()
        self._draw(methodcaller("close"))
        self._view = None
        if self._follower is not None:
            self._follower.close()

    def _absorb(self, record: Record) -> None:
        step = int(record["step"])
        if evaluated := {name: value for name, value in record.items() if name.startswith("eval/")}:
            self._evals.setdefault(step, {}).update(evaluated)
        if is_step_record(record):
            self._latest = {**self._sampled.pop(step, {}), **record}
            self._first = self._first or self._latest
            self._pace.append((step, float(record["time"])))
        else:
            sampled = {name: record[name] for name, *_ in COLUMNS if name in record}
            self._sampled.setdefault(step, {}).update(sampled)

    def _seconds_left(self) -> float | None:
        if not self._pace:
            return None
        (first, start), (last, end) = self._pace[0], self._pace[-1]
        per_step = (end - start) / (last - first) if last > first else self._latest.get("time/step_s")
        return None if per_step is None else max(0.0, per_step * (self._total - last))

    def _step_line(self, record: Record, step: int, at: float) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        width = len(str(self._total))
        parts = [f"{clock} step {step:>{width}}/{self._total}", *_values(record, aligned=True)]
        if (left := self._seconds_left()) is not None:
            parts.append(f"{duration(left):>8} left")
        if failed := record.get("rollout/reward_failed"):
            suffix = f" of {self._samples}" if self._samples else ""
            parts.append(f"{failed:.0f}{suffix} samples failed")
        if skipped := record.get("train/skipped_updates"):
            overflowed = record.get("train/overflowed_updates")
            cause = f", {overflowed:.0f} for a loss scale too large" if overflowed else ""
            parts.append(f"{skipped:.0f} updates skipped{cause}")
        if record.get("train/updates") == 0:
            parts.append("no signal, no update")
        return " | ".join(parts)

    def _eval_line(self, step: int, name: str, record: Record) -> str:
        first = min(self._evals)
        since = f" (change since step {first})" if first < step else ""
        return f"held-out at step {step}: {describe(name, record, self._evals[first] if since else None)}{since}"

    def _refresh(self) -> None:
        left = self._seconds_left()
        values = list(_values(self._latest, aligned=False, first=self._first))
        if scores := heldout_scores(self._evals.values()):
            name, label = next(iter(scores.items()))
            step_scores = [scored[name] for _, scored in sorted(self._evals.items()) if name in scored]
            label = "held-out" if label == "accuracy" else f"held-out {label}"
            values.append(f"{label} {_changed(step_scores[-1], step_scores[0], score_format(name))}")
        done = int(self._latest.get("step", 0))
        if not self._latest or done >= self._total:
            status = "done" if self._latest else "waiting for the first step"
        elif left is None:
            status = ""
        else:  # counts down between steps
            status = f"{duration(max(0.0, left - max(0.0, time.time() - self._pace[-1][1])))} left"
        self._drawn_at = time.monotonic()
        self._draw(lambda view: view.show(done, self._total, status, values))

    def _draw(self, action: Callable[[LiveView | PlainView], None]) -> None:
        if self._view is None:
            return
        try:
            action(self._view)
        except (OSError, ValueError):  # a closed pipe or stream
            self._view = None


def _values(record: Record, aligned: bool, first: Record | None = None) -> Iterator[str]:
    for name, label, width, form, unit in COLUMNS:
        if name not in record or (name == "train/loss" and "rollout/reward_mean" in record):
            continue  # the loss is shown only without a reward
        since = first.get(name) if first and name in _CHANGING else None
        text = _changed(record[name], since, form)
        yield label + (text.rjust(width) if aligned else text) + unit


def _changed(value: float | None, first: float | None, form: str) -> str:
    """Format a value with the change since the first value: `0.480 (+0.338)`."""
    if value is None:
        return "n/a"
    change = f" ({value - first:+{form}})" if first not in (None, value) else ""
    return format(value, form) + change
