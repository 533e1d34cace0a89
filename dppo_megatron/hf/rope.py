"""Computes the rotary frequencies for a config.json, to build a model or to check an existing model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .hf_config import HFModelConfig

if TYPE_CHECKING:
    from jaxtyping import Float


def inverse_frequencies(hf: HFModelConfig) -> Float[Tensor, " r/2"]:
    """Return each rotated pair's angle per position, fp32, as transformers computes it for `hf.rope_type`."""
    dim = hf.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / hf.rope_theta**exponents
    if hf.rope_type == "default":
        return frequencies
    if hf.rope_type == "llama3":
        return _llama3(frequencies, hf.rope_scaling)
    if hf.rope_type == "yarn":
        return _yarn(frequencies, hf)
    raise ValueError(f"rope_type = {hf.rope_type!r}: not supported")


def yarn_scale(scaling: Mapping[str, Any]) -> float:
    """Return the factor by which YaRN scales rotated queries and keys (https://arxiv.org/abs/2309.00071, section 3.4).

    `mscale` and `mscale_all_dim` are not read.
    """
    return float(scaling.get("attention_factor") or 0.1 * math.log(max(scaling["factor"], 1.0)) + 1)


def _yarn(frequencies: Tensor, hf: HFModelConfig) -> Tensor:
    """Divide frequencies with few rotations over the original positions by `factor`; keep frequencies with many.

    Between `beta_slow` and `beta_fast` rotations both are blended, linearly in the pair index.
    """
    scaling, pairs = hf.rope_scaling, len(frequencies)
    original = scaling.get("original_max_position_embeddings") or hf.max_position_embeddings

    def index(rotations: float) -> float:
        return pairs * math.log(original / (rotations * 2 * math.pi)) / math.log(hf.rope_theta)

    low, high = index(scaling.get("beta_fast") or 32), index(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(pairs).float() - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling["factor"] * interpolated + frequencies * (1 - interpolated)


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones and blend between them (Llama 3.1)."""
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return frequencies / factor * (1 - blend) + frequencies * blend
