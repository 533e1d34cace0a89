"""Computes the rotary frequencies of a config.json, to build a model and to compare one."""

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
    """Return the angle per position of each rotated pair, fp32, as transformers computes it for `hf.rope_type`."""
    dim = hf.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / hf.rope_theta**exponents
    if hf.rope_type == "default":
        return frequencies
    if hf.rope_type == "llama3":
        return _llama3(frequencies, hf.rope_scaling)
    raise ValueError(f"rope_type = {hf.rope_type!r}: not implemented")


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones and blend between them (Llama 3.1)."""
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return frequencies / factor * (1 - blend) + frequencies * blend
