"""The report of a run, or of several side by side: a table on the console, report.md and curves.png."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dppo_megatron.common.files import output, write_atomic
from dppo_megatron.errors import bounded

from .curves import draw_curves
from .history import History, ReportError, labels, load_history
from .masked_tokens import masked_rows
from .summary import NONE, summary_rows, time_rows

Rows = dict[str, list[str]]  # quantity -> its value in each run

_LONGEST_CELL = 400  # bytes

_NOTES = """\
Masked share counts tokens with advantage A other than 0. Mismatch compares the engine's log-probs of the sampled
tokens with the trainer's, for the same weights, in nats. Parts of a step are seconds of a mean step; `other` is
what no part accounts for. Most masked tokens are counted from the ten of each step, with their share of all
masked tokens.
"""


def write_report(
    runs: Path | str | Sequence[Path | str], out: Path | str | None = None, *, console: Console | None = None
) -> Path:
    """Prints the table and writes report.md and curves.png; returns the path of report.md.

    One run: into `out`, by default RUN/report. Several: side by side and curves overlaid, into `out`, by
    default `report` next to the first run. Works on a run that is still going. Raises ReportError for a run
    directory without metrics.
    """
    run_dirs = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    if not run_dirs:
        raise ReportError("no run directory given")
    histories = [load_history(path, label) for path, label in zip(run_dirs, labels(run_dirs), strict=True)]
    default = run_dirs[0] / "report" if len(run_dirs) == 1 else run_dirs[0].parent / "report"
    directory = output(default if out is None else Path(out), directory=True)
    path, curves = output(directory / "report.md"), output(directory / "curves.png")
    draw_curves(histories, curves)

    summary, times = _side_by_side(histories, summary_rows), _side_by_side(histories, time_rows)
    masked = _side_by_side(histories, lambda history: masked_rows(history.masked))
    names = [bounded(history.label, _LONGEST_CELL) for history in histories]
    console = console or Console()
    console.print(_table("run", names, summary))
    if times:
        console.print(_table("where a step's time goes", names, times))
    if masked:
        console.print(_table("most masked tokens", names, masked))
    sections = [f"# {' against '.join(map(as_text, names))}", _markdown("", names, summary)]
    if times:
        sections += ["## Where a step's time goes", _markdown("part", names, times)]
    if masked:
        sections += ["## Most masked tokens", _markdown("", names, masked)]
    sections += ["## Curves", "![curves](curves.png)", _NOTES]
    write_atomic(path, "\n\n".join(sections))
    return path


def _side_by_side(histories: Sequence[History], rows_of: Callable[[History], dict[str, str]]) -> Rows:
    """Rows of all runs together; what no run has is left out."""
    columns = [dict([bounded(text, _LONGEST_CELL) for text in row] for row in rows_of(h).items()) for h in histories]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = {key: [column.get(key, NONE) for column in columns] for key in keys}
    return {key: values for key, values in rows.items() if any(value.strip(f"{NONE}, ") for value in values)}


def _table(title: str, names: Sequence[str], rows: Rows) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title, style="dim", no_wrap=True)
    for name in names:
        table.add_column(escape(name), overflow="fold")
    for key, values in rows.items():
        table.add_row(*map(escape, (key, *values)))  # a token may look like markup
    return table


def _markdown(corner: str, names: Sequence[str], rows: Rows) -> str:
    lines = [[corner, *names], ["---"] * (len(names) + 1)]
    lines += [[key, *values] for key, values in rows.items()]
    return "\n".join("| " + " | ".join(map(as_text, line)) + " |" for line in lines)


def as_text(text: str) -> str:
    """`text` in one line of Markdown that shows it as it is: no HTML, links, images, emphasis, code or table cells."""
    words = " ".join(html.escape(text, quote=False).split())
    escaped = re.sub(r"[\\`*~$|\[\]]|(?<![^\W_])_|_(?![^\W_])|(?<=www)\.|:(?=//)", r"\\\g<0>", words)
    return f"&nbsp;&nbsp;{escaped}" if text.startswith(" ") else escaped  # leading blanks mean "of which"
