"""Rotary position embedding by position id: one table look-up per micro-batch instead of one slice per sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dppo_megatron.common.row_math import rope_tables, rotated
from dppo_megatron.hf import inverse_frequencies

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["inverse_frequencies", "rope_tables", "rotate"]


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
        return rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        return rotated(grad, *ctx.saved_tensors, -1), None, None
