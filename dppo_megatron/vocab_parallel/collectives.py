"""All-gather, and the differentiable collectives of a column-parallel head around linear_token_statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(out: Tensor, value: Tensor, group: dist.ProcessGroup) -> None:
    """out [W rows, ...] = the ranks' value [rows, ...] in rank order."""
    # torch 2.13 renamed the function and deprecated the old name; older versions have only that one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, value, group=group)


def _reduce_scatter(out: Tensor, value: Tensor, group: dist.ProcessGroup) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, value, group=group)


class _ReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        world = dist.get_world_size(group)
        out = hidden.new_empty((world * hidden.shape[0], *hidden.shape[1:]))
        all_gather(out, hidden.contiguous(), group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        world = dist.get_world_size(ctx.group)
        out = gradient.new_empty((gradient.shape[0] // world, *gradient.shape[1:]))
        _reduce_scatter(out, gradient.contiguous(), ctx.group)
        return out, None


def reduce_gradient(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Identity forward, all-reduce (sum) backward: for replicated hidden before a column-parallel product."""
    return _ReduceGradient.apply(hidden, group)


def gather_sequence(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather [rows, H] -> [W rows, H] forward, reduce-scatter (sum) backward."""
    return _GatherSequence.apply(hidden, group)
