"""Create every table and figure of the study from its stored rows.

It writes results/*/report.md, docs/chains.png and the verdicts in docs/study.md.

.venv/bin/python studies/chains/report.py    # from the root of the repository
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from claims import table
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dppo_megatron.lab.study.grid import read_study
from dppo_megatron.lab.study.rows import StudyRow, read_rows
from dppo_megatron.lab.study.study_report import draw_curves, write_report
from dppo_megatron.lab.study.verdicts import estimate, finals

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
sys.path.append(str(DOCS))
from draw_schemes import ink, save_both  # noqa: E402

START, END = "<!-- claims -->\n", "<!-- claims end -->\n"  # around the table in study.md
CONDITION = "stale"
SHOWN = {"pg_is": "#999999", "clip_higher": "#D55E00", "dppo_binary_tv": "#0072B2"}


def main() -> None:
    for results in sorted(path for path in (HERE / "results").iterdir() if path.is_dir()):
        print(write_report(read_study(HERE / f"{results.name}.yaml", results).file, results))
    methods, ablations = (read_rows(HERE / "results" / name) for name in ("methods", "ablations"))
    page = DOCS / "study.md"
    before, rest = page.read_text().split(START)
    lines = table([row for row in methods + ablations if row.condition == CONDITION])
    page.write_text(before + START + "\n".join(lines) + "\n" + END + rest.split(END)[1])
    print(page)
    print(save_both(partial(draw, methods), DOCS / "chains.png", dpi=110))


def draw(rows: Sequence[StudyRow]) -> Figure:
    """Draw the curves of three methods and the last value of every run of every method."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(5, 4))
    for method, colour in SHOWN.items():
        draw_curves(left, rows, CONDITION, method, colour)
    left.set(xlabel="step (64 updates on one batch)", ylabel="right of held-out chains, sampled", ylim=(0, 1))
    left.legend(frameon=False, fontsize=9, loc="lower right")
    _draw_ends(right, rows)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_ends(axes: Axes, rows: Sequence[StudyRow]) -> None:
    """Draw one line per method, the best at the top: a dot per seed, the mean and its interval."""
    ended = {method: list(finals(rows, method, CONDITION).values()) for method in {row.method for row in rows}}
    methods = sorted(ended, key=lambda method: float(np.mean(ended[method])))
    for line, method in enumerate(methods):
        colour = SHOWN.get(method, ink())
        axes.plot(ended[method], [line] * len(ended[method]), "o", color=colour, ms=3.5, alpha=0.5, mew=0)
        if found := estimate(ended[method]):
            axes.plot([found.low, found.high], [line, line], color=colour, lw=1.4)
            axes.plot(found.mean, line, "|", color=colour, ms=10, mew=2)
    axes.set(xlim=(0, 1), xlabel="after 15 steps: seeds, mean, 95 % interval")
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    axes.grid(axis="x")


if __name__ == "__main__":
    main()
