"""Reports a study's stored rows as a table with intervals, and as curves with bands over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dppo_megatron.common.files import output, write_atomic
from dppo_megatron.report.curves import PALETTE
from dppo_megatron.report.history import ReportError

from .grid import StudyFile
from .rows import StudyRow, read_rows, write_tables
from .verdicts import Estimate, difference, estimate, finals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS_IN_A_PANEL = 5


def write_report(file: StudyFile, directory: Path) -> Path:
    """Write report.md, curves.png and the tables, and return the report.md path. Raises `ReportError` without rows."""
    rows = read_rows(directory)
    if not rows:
        raise ReportError(f"{directory}: no run of the study has ended there")
    path, curves = output(directory / "report.md"), output(directory / "curves.png")
    write_tables(directory, rows)
    _draw(file, rows, curves)
    write_atomic(path, "\n".join(_lines(file, rows)) + "\n")
    return path


def _lines(file: StudyFile, rows: Sequence[StudyRow]) -> Iterator[str]:
    reference, *_ = file.methods
    num_runs = len(file.methods) * len(file.conditions) * len(file.seeds)
    yield f"# {len(rows)} of {num_runs} runs"
    yield ""
    yield (
        f"Where `{file.metric}` ended: mean over seeds with the 95 % interval of Student's t, and the difference to "
        f"{reference} paired by seed, of all runs and of survivors, which did not collapse. Collapsed: it ended below "
        f"{file.collapse:g} of its best value or below its first, or the run failed. Bold: the interval of the "
        "difference leaves out 0."
    )
    survivors = [row for row in rows if not row.collapsed]
    for condition in file.conditions:
        yield from ("", f"## {condition}", "")
        to = f"to {reference}"
        yield f"| method | collapsed | {file.metric} | {to} | of survivors | {to} | masked share | mismatch KL |"
        yield "|---|---|---|---|---|---|---|---|"
        for method in file.methods:
            method_rows = [row for row in rows if row.method == method and row.condition == condition]
            if not method_rows:
                continue
            cells = [
                method,
                f"{sum(row.collapsed for row in method_rows)} of {len(method_rows)}",
                *_comparison(rows, method, reference, condition),
                *_comparison(survivors, method, reference, condition),
                _mean([row.masked_share for row in method_rows], ".2%"),
                _mean([row.mismatch_kl for row in method_rows], ".1e"),
            ]
            yield f"| {' | '.join(map(str, cells))} |"
    yield from ("", "![curves](curves.png)")


def _comparison(rows: Sequence[StudyRow], method: str, reference: str, condition: str) -> tuple[str, str]:
    """Return as text: (where the method ended, how it differs from the reference)."""
    ended = list(finals(rows, method, condition).values())
    apart = None if method == reference else difference(rows, method, reference, condition)
    reached = _shown(estimate(ended)) if len(ended) > 2 else ", ".join(f"{value:.3f}" for value in ended)
    shown = _shown(apart, "+")
    return reached or "-", f"**{shown}**" if apart is not None and apart.excludes_zero else shown


def _shown(estimate: Estimate | None, sign: str = "") -> str:
    return (
        "-" if estimate is None else f"{estimate.mean:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"
    )


def _mean(values: Sequence[float | None], form: str) -> str:
    numbers = [value for value in values if value is not None]
    return format(float(np.mean(numbers)), form) if numbers else "-"


def _draw(file: StudyFile, rows: Sequence[StudyRow], path: Path) -> None:
    """Draw a panel for each condition, and with many methods for each method, with the first method in gray."""
    from matplotlib.figure import Figure  # unlike pyplot, this needs no display and has no global state

    reference, *other_methods = file.methods
    apart = len(file.methods) > METHODS_IN_A_PANEL
    groups = [[method] for method in other_methods] if apart else [other_methods]
    panels = [(condition, methods) for condition in file.conditions for methods in groups]
    columns = min(len(panels), 5) if apart else len(panels)
    lines = -(-len(panels) // columns)
    width, height = (2.6, 2.2) if apart else (4.6, 3.6)
    figure = Figure(figsize=(width * columns, height * lines), dpi=120, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True).flat
    for (condition, methods), axes in zip(panels, grid, strict=False):
        axes.set_title(f"{methods[0]}, {condition}" if apart else condition, fontsize=9)
        draw_curves(axes, rows, condition, reference, "#999999" if apart else PALETTE[0])
        for number, method in enumerate(methods, start=1):
            draw_curves(axes, rows, condition, method, PALETTE[number % len(PALETTE)])
        if not apart:
            axes.legend(fontsize=8)
    for axes in grid:  # unused
        axes.set_axis_off()
    figure.supxlabel(f"step (grey: {reference})" if apart else "step", fontsize=9)
    figure.supylabel(file.metric, fontsize=9)
    figure.savefig(path, format="png")


def draw_curves(axes: Axes, rows: Sequence[StudyRow], condition: str, method: str, colour: str) -> None:
    """Draw the mean and the range over seeds at the steps that all seeds have."""
    curves = [dict(row.curve) for row in rows if row.method == method and row.condition == condition and row.curve]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    if not steps:
        return
    values = np.array([[curve[step] for step in steps] for curve in curves])
    axes.plot(steps, values.mean(axis=0), color=colour, lw=1.8, label=method)
    axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, lw=0)
