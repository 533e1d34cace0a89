"""Draw docs/gradient_weights.png, light and dark: the weight each method gives a token's gradient, against its ratio.

    python docs/draw_gradient_weights.py [output.png]

Needs matplotlib. The curves are the `.weight` that the objectives themselves report.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from draw_schemes import ink, save_both
from matplotlib.figure import Figure

from dppo_megatron.objectives import build_objective

METHODS = (
    # Wide lines are below narrow ones, because several methods share the lines w = 1 and w = 0.
    ("dppo_binary_tv", {}, "DPPO binary TV, delta 0.15", "tab:cyan", "-", 4.0),
    ("dppo_binary_tv", {"ratio_cap": 5.0}, "the same, ratio cap 5", "tab:blue", ":", 2.0),
    ("ppo", {}, "PPO / GRPO, clip 0.2", None, "-", 1.2),
    ("spo", {}, "SPO, epsilon 0.2", "tab:red", "-", 1.5),
    ("drpo_tr", {}, "drpo_tr, delta 0.2", "tab:green", "-", 1.5),
    ("drpo", {}, "drpo as published, delta 12.5", "tab:orange", "--", 1.5),
)
TOKENS = (
    (0.001, (0.1, 100.0), "log", "rare token, mu = 0.001"),
    (0.9, (0.5, 0.999 / 0.9), "linear", "frequent token, mu = 0.9"),
)


def weights(name: str, overrides: dict[str, float], mu: float, ratio: torch.Tensor, advantage: float):
    rollout = torch.full_like(ratio, mu).log()
    out = build_objective(name, **overrides)(
        logprob=rollout + ratio.log(),
        rollout_logprob=rollout,
        advantage=torch.full_like(ratio, advantage),
        mask=torch.ones_like(ratio, dtype=torch.bool),
    )
    return out.weight


def draw() -> Figure:
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.6), sharey=True, layout="constrained")
    for column, (mu, (low, high), scale, title) in enumerate(TOKENS):
        ratio = torch.logspace(math.log10(low), math.log10(high), 2000, dtype=torch.float64)
        for row, (advantage, sign) in enumerate(((1.0, "A > 0"), (-1.0, "A < 0"))):
            axis = axes[row, column]
            for name, overrides, label, colour, line, width in METHODS:
                curve = weights(name, overrides, mu, ratio, advantage)
                axis.plot(ratio, curve, line, color=colour or ink(), linewidth=width, label=label)
            axis.axvline(1, color=ink(), linewidth=0.5, alpha=0.5)
            axis.axhline(0, color=ink(), linewidth=0.5, alpha=0.5)
            axis.set(xscale=scale, ylim=(-2.2, 3.2), title=f"{title}, {sign}")
            axis.title.set_fontsize(10)
    for axis in axes[1]:
        axis.set_xlabel("ratio pi(a) / mu(a)")
    for axis in axes[:, 0]:
        axis.set_ylabel("gradient weight w")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    return figure


if __name__ == "__main__":
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "gradient_weights.png"
    print(save_both(draw, output, dpi=90))
