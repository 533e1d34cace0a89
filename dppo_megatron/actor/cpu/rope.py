"""Rotary position embedding by position id: one table look-up per micro-batch instead of one slice per sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dppo_megatron.hf import inverse_frequencies

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["inverse_frequencies", "rope_tables", "rotate"]


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
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        return _rotate(grad, *ctx.saved_tensors, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin, value=direction)
