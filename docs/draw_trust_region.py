"""Draw docs/trust_region.png, light and dark: the moves of a token's probability that PPO's clip and DPPO allow.

    python docs/draw_trust_region.py [output.png]

Needs matplotlib. The objectives compute the regions: a move from mu to pi is allowed if the token keeps its gradient
for both signs of its advantage.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from draw_schemes import ink, paper, save_both
from matplotlib.figure import Figure

from dppo_megatron.objectives import Objective, build_objective

PPO, DPPO = "#D55E00", "#0072B2"  # colours of Okabe and Ito, distinct for colour-blind readers
METHODS = ((build_objective("dppo_binary_tv", delta=0.15), DPPO), (build_objective("ppo", epsilon=0.2), PPO))
EXAMPLES = (  # panel, mu, pi, position of the text, text
    (0, 0.001, 0.02, (0.0035, 0.0005), "0.001 to 0.02\nratio 20, moved 0.019\nPPO clips, DPPO trains"),
    (1, 0.99, 0.80, (0.42, 0.16), "0.99 to 0.80\nratio 0.81, moved 0.19\nPPO trains, DPPO masks"),
)


def keeps_gradient(objective: Objective, mu: np.ndarray, pi: np.ndarray) -> np.ndarray:
    """Return True where the token keeps its gradient for both signs of A. mu, pi: its probabilities, of one shape."""
    rollout, logprob = (torch.from_numpy(p.ravel()).log() for p in (mu, pi))
    mask = torch.ones_like(rollout, dtype=torch.bool)
    weights = [
        objective(logprob=logprob, rollout_logprob=rollout, advantage=torch.full_like(rollout, a), mask=mask).weight
        for a in (1.0, -1.0)
    ]
    return ((weights[0] != 0) & (weights[1] != 0)).numpy().reshape(mu.shape)


def draw() -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 4.0), layout="constrained")
    grids = (np.geomspace(1e-4, 1 - 1e-6, 700), np.linspace(1e-4, 1 - 1e-6, 700))
    for axis, grid, scale, title in zip(
        axes, grids, ("log", "linear"), ("rare tokens (both axes logarithmic)", "frequent tokens"), strict=True
    ):
        mu, pi = np.meshgrid(grid, grid)
        for objective, colour in METHODS:
            inside = keeps_gradient(objective, mu, pi).astype(float)
            axis.contourf(mu, pi, inside, levels=[0.5, 1.5], colors=[colour], alpha=0.35)
            axis.contour(mu, pi, inside, levels=[0.5], colors=[colour], linewidths=1.2)
        axis.plot(grid, grid, color=ink(), lw=0.8, alpha=0.6)
        axis.set(xscale=scale, yscale=scale, aspect="equal", xlim=(grid[0], 1), ylim=(grid[0], 1))
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("probability of the token when it was sampled, mu(a)", fontsize=9)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("its probability now, pi(a)", fontsize=9)
    for panel, mu, pi, place, text in EXAMPLES:
        arrow = {"arrowstyle": "->", "color": ink(), "lw": 0.8}
        axes[panel].plot(mu, pi, "o", color=ink(), ms=5)
        box = {"boxstyle": "round", "facecolor": paper(), "edgecolor": "none", "alpha": 0.85}
        axes[panel].annotate(text, (mu, pi), place, fontsize=8, arrowprops=arrow, bbox=box)
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour, alpha=0.45) for colour in (PPO, DPPO)]
    names = ["allowed by PPO: ratio within 1 ± 0.2", "allowed by DPPO: |pi(a) - mu(a)| at most 0.15"]
    figure.legend(patches, names, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


if __name__ == "__main__":
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "trust_region.png"
    print(save_both(draw, output, dpi=100))
