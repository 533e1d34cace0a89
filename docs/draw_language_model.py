"""Draw the held-out accuracy of the language model over minutes, from stored rows: docs/language_model.png.

for seed in 1 2 3 4 5; do .venv/bin/python examples/language_model/run.py --seed $seed --rows ROWS; done
.venv/bin/python docs/draw_language_model.py ROWS [output.png]    # ROWS: one JSON line per seed, and comments
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
import numpy as np
from draw_quickstart import save

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(rows: Path, output: Path) -> None:
    runs = [json.loads(line) for line in rows.read_text().splitlines() if line.startswith("{")]
    figure, axis = plt.subplots(figsize=(7.2, 2.9), layout="constrained")
    for run in runs:
        axis.plot(run["minutes"], run["accuracy"], color="#56B4E9", lw=1)
    minutes, accuracy = (np.mean([run[name] for run in runs], axis=0) for name in ("minutes", "accuracy"))
    axis.plot(minutes, accuracy, "o-", color="#0072B2", lw=2, label=f"mean of {len(runs)} seeds")
    for at, place, align in ((0, (8, -12), "left"), (-1, (-8, -16), "right")):
        axis.annotate(
            f"{accuracy[at]:.0%}", (minutes[at], accuracy[at]), place, textcoords="offset points", ha=align, fontsize=9
        )
    axis.set(xlabel="minutes from the command, without installation", xlim=(0, None))
    axis.set_ylabel("held-out accuracy, greedy")
    save(figure, axis, output, "lower right")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / "language_model.png")
