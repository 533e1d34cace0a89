"""Draw accuracy and reward of a run: docs/quickstart.png, docs/calculator.png.

make quickstart && .venv/bin/python docs/draw_quickstart.py runs/quickstart/dppo [output.png]
.venv/bin/python docs/draw_quickstart.py runs/calculator/dppo docs/calculator.png  # after examples/calculator/run.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from dppo_megatron.report.history import load_history


def main(run: Path, output: Path) -> None:
    history = load_history(run, run.name)
    reward = history.series("rollout/reward_mean")
    figure, axis = plt.subplots(figsize=(7.2, 2.9), layout="constrained")
    axis.plot(reward.steps, reward.values, color="#56B4E9", lw=1.4, label="reward of the batch, sampled")
    shown = history.series("eval/accuracy") or reward
    if shown != reward:
        label = f"accuracy on {int(history.series('eval/prompts').values[0])} held-out sums, greedy"
        axis.plot(shown.steps, shown.values, "o-", color="#0072B2", lw=2, label=label)
    for at in (0, -1):
        text, place, align = f"{shown.values[at]:.1%}", *(((8, -4), "left") if at == 0 else ((3, -16), "right"))
        axis.annotate(
            text, (shown.steps[at], shown.values[at]), place, textcoords="offset points", ha=align, fontsize=9
        )
    axis.set_xlabel("step")
    save(figure, axis, output, "center right")


def save(figure: Figure, axis: Axes, output: Path, legend: str) -> None:
    """Save shares from 0 to 100 %, with the legend at this place."""
    axis.set_ylim(0, 1.05)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#EEEEEE")
    axis.legend(frameon=False, fontsize=9, loc=legend)
    figure.savefig(output, dpi=100)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / "quickstart.png")
