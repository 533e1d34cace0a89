"""Computes the head so that logits and hidden gradients have the same bits in every batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dppo_megatron.common.row_math import product

from .collectives import reduce_gradient

if TYPE_CHECKING:
    from jaxtyping import Float

# A product takes this many rows: enough to fill the device, but few, because padding rows in the last tile are wasted.
_TILE_CPU = 128
_TILE_GPU = 512


def invariant_mm(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows [T, A] @ matrix [A, B] + bias [B] in rows' dtype; a row's bits do not depend on other rows."""
    return product(rows, matrix, bias, tile=_TILE_CPU if rows.is_cpu else _TILE_GPU, dtype=rows.dtype)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            return invariant_mm(hidden, weight.t())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad
        d_hidden = invariant_mm(gradient, weight) if need_hidden else None
        d_weight = torch.mm(gradient.t(), hidden) if need_weight else None
        return d_hidden, d_weight


def batch_invariant_logits(
    hidden: Float[Tensor, "T H"], weight: Float[Tensor, "V_local H"], group: dist.ProcessGroup | None = None
) -> Float[Tensor, "T V_local"]:
    """Return hidden @ weight.T; a row and its hidden gradient have the same bits in every batch.

    hidden [T, H] is replicated over `group`. weight [V_local, H] has this rank's rows. Both have the same dtype. The
    hidden gradient is complete on return. The library chooses the order in which the weight gradient sums the rows.
    With a group, the backward pass runs an all-to-all and an all-gather of the hidden gradient.
    """
    if group is not None and dist.get_world_size(group) > 1:
        hidden = reduce_gradient(hidden, group, in_order=True)
    return _Head.apply(hidden, weight)
