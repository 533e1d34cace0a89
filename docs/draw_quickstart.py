"""Draw docs/quickstart.png: accuracy and reward of a quickstart's run.

make quickstart && .venv/bin/python docs/draw_quickstart.py runs/quickstart/dppo [output.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from dppo_megatron.observability.history import load_history


def main(run: Path, output: Path) -> None:
    history = load_history(run, run.name)
    accuracy, reward = history.series("eval/accuracy"), history.series("rollout/reward_mean")
    figure, axis = plt.subplots(figsize=(7.2, 2.9), layout="constrained")
    axis.plot(reward.steps, reward.values, color="#56B4E9", lw=1.4, label="reward of the batch, sampled")
    axis.plot(
        accuracy.steps, accuracy.values, "o-", color="#0072B2", lw=2, label="accuracy on 500 held-out sums, greedy"
    )
    for at in (0, -1):
        text, place, align = f"{accuracy.values[at]:.1%}", *(((8, -4), "left") if at == 0 else ((3, -16), "right"))
        point = (accuracy.steps[at], accuracy.values[at])
        axis.annotate(text, point, place, textcoords="offset points", ha=align, fontsize=9)
    axis.set(xlabel="step", ylim=(0, 1.05))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#EEEEEE")
    axis.legend(frameon=False, fontsize=9, loc="center right")
    figure.savefig(output, dpi=100)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / "quickstart.png")
