"""Rewards that differ by one rounding step, as a remote reward model gives them, must not become full-size advantages.

Run from a clone's root: PYTHONPATH=. python tests/reproducers/reward_noise.py
"""

import sys

import torch

from dppo_megatron.objectives import group_advantages, turn_advantages

one = torch.tensor(1.0)
ulp = torch.stack([one, one, one, torch.nextafter(one, torch.tensor(0.0))])[None]
noisy = 0.7 + 1e-6 * torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
wrong = False
for kind in ("group_mean", "group_mean_std", "leave_one_out", "batch_normalised"):
    for name, rewards in (("one ulp below 1", ulp), ("0.7 with noise of 1e-6", noisy)):
        largest = float(group_advantages(rewards, kind=kind).abs().max())
        wrong |= largest > 1e-3
        print(f"{kind}: {name}: largest |advantage| {largest:.2g}", "<- NOISE AS A SIGNAL" if largest > 1e-3 else "")
turns = turn_advantages(ulp, torch.zeros(1, 4, 1), torch.ones(1, 4, dtype=torch.long), kind="group_mean_std")
print("the same rewards by turns: largest |advantage|", float(turns.abs().max()))
sys.exit(wrong or float(turns.abs().max()) > 1e-3)
