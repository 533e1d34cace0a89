"""Rotary position embedding by position id: one table look-up per micro-batch instead of one slice per sequence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dppo_megatron.hf import HFModelConfig

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def inverse_frequencies(hf: HFModelConfig) -> Float[Tensor, " d/2"]:
    """Angle per position of each rotated pair, fp32, as transformers computes it for `hf.rope_type`."""
    exponents = torch.arange(0, hf.head_dim, 2, dtype=torch.int64).float() / hf.head_dim
    frequencies = 1.0 / hf.rope_theta**exponents
    if hf.rope_type == "default":
        return frequencies
    if hf.rope_type == "llama3":
        return _llama3(frequencies, hf.rope_scaling)
    raise ValueError(f"rope_type = {hf.rope_type!r}: not implemented")


def rope_tables(
    frequencies: Float[Tensor, " d/2"], position_ids: Int[Tensor, " T"], dtype: torch.dtype
) -> tuple[Float[Tensor, "T 1 d"], Float[Tensor, "T 1 d"]]:
    """Cosine, and sine with the sign of each half, of every row's angles; computed in fp32."""
    angles = torch.outer(position_ids.to(frequencies.dtype), frequencies)[:, None]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(
    x: Float[Tensor, "T h d"], cos: Float[Tensor, "T 1 d"], sin: Float[Tensor, "T 1 d"]
) -> Float[Tensor, "T h d"]:
    """Rotate the pairs (i, i + d/2) of each head by the row's angles (the layout of Hugging Face weights)."""
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back; nothing but the tables is kept."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        return _rotated(grad, *ctx.saved_tensors, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin, value=direction)


def _llama3(frequencies: Tensor, scaling) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return frequencies / factor * (1 - blend) + frequencies * blend
