"""The worked cases of objective_vectors.json, the preset that each of their losses is, and how near is right."""

import json
from pathlib import Path
from typing import Any

import torch

VECTORS = json.loads((Path(__file__).parent / "objective_vectors.json").read_text())
CASES = {case["name"]: case for case in VECTORS["cases"]}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

# worked-case loss -> (preset, overrides, name of the loss value to compare with)
METHODS: dict[str, tuple[str, dict[str, Any], str]] = {
    "surrogate_PG_IS": ("pg_is", {}, "loss"),
    "PG_TIS_C3 (paper's CISPO)": ("pg_tis", {}, "loss"),
    "PPO_eps0.2": ("ppo", {}, "loss"),
    "GRPO_clip_higher_0.2_0.28": ("grpo_clip_higher", {}, "loss"),
    "CISPO_minimax_low1_high4": ("cispo", {}, "loss"),
    "SPO_eps0.2": ("spo", {}, "loss"),
    "SPO_eps12.5": ("spo", {"epsilon": 12.5}, "loss"),
    "DRPO_delta0.15": ("drpo_tr", {"delta": 0.15}, "loss"),
    "DRPO_delta2.5": ("drpo", {"delta": 2.5}, "loss"),
    "DRPO_delta12.5": ("drpo", {}, "loss"),
    "DPPO_binTV_delta0.15": ("dppo_binary_tv", {}, "loss"),
    "DPPO_binKL_delta0.05": ("dppo_binary_kl", {}, "loss"),
    "DPPO_topkTV_paper_union_delta0.15": ("dppo_topk_tv", {}, "loss"),
    "DPPO_topkKL_paper_union_delta0.05": ("dppo_topk_kl", {}, "loss"),
    "DPPO_binTV_C5 (paper scaling runs)": ("dppo_binary_tv", {"ratio_cap": 5.0}, "loss"),
}
# The same gradient written as sg(min(r, 1e4)) ln pi.
LOGPROB_FORM = {
    "DPPO_binTV_delta0.15": ("dppo_binary_tv", {"ratio_cap": 1e4}, "verl_form_loss"),
    "DPPO_binKL_delta0.05": ("dppo_binary_kl", {"ratio_cap": 1e4}, "verl_form_loss"),
}
NOT_THE_PAPER = {"DPPO_topkTV_replace_last_delta0.15", "DPPO_topkKL_replace_last_delta0.05"}
RUNS = [*((loss, *how) for loss, how in METHODS.items()), *((loss, *how) for loss, how in LOGPROB_FORM.items())]


def close(actual: torch.Tensor, expected: Any, dtype: torch.dtype) -> None:
    # fp32 on numbers in the thousands (SPO on a rare token) is held to 1e-5 relative.
    expected = torch.tensor(expected, dtype=torch.float64).reshape(actual.shape)
    bound = TOLERANCE[dtype] * expected.abs().clamp(min=1.0)
    assert ((actual.double() - expected).abs() <= bound).all(), (actual, expected)
