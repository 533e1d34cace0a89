"""Provides an all-gather, and the differentiable collectives of a column-parallel head."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .merge import ordered_sum


def all_gather(out: Tensor, value: Tensor, group: dist.ProcessGroup) -> None:
    """Gather value [rows, ...] from every rank into out [W rows, ...], in rank order."""
    # torch 2.13 renamed the function and deprecated the old name; older versions have only the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, value, group=group)


def _ordered_reduce_scatter(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum value [W rows, ...] over the ranks in rank order, and return this rank's rows.

    A ring starts each buffer part's sums at a different rank, so an element's bits would depend on its position.
    """
    received, world = torch.empty_like(value), dist.get_world_size(group)
    dist.all_to_all_single(received, value, group=group)
    return ordered_sum(received.view(world, value.shape[0] // world, *value.shape[1:]))


def _ordered_all_reduce(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum value [rows, ...] over the ranks in rank order. This moves as many bytes as a ring."""
    rows, world = value.shape[0], dist.get_world_size(group)
    filled = value.new_zeros((-(-rows // world) * world, *value.shape[1:]))
    filled[:rows] = value
    out = torch.empty_like(filled)
    all_gather(out, _ordered_reduce_scatter(filled, group), group)
    return out[:rows]


class _ReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup, in_order: bool) -> Tensor:
        ctx.group, ctx.in_order = group, in_order
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.in_order:
            return _ordered_all_reduce(gradient, ctx.group), None, None
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup, in_order: bool) -> Tensor:
        ctx.group, ctx.in_order = group, in_order
        world = dist.get_world_size(group)
        out = hidden.new_empty((world * hidden.shape[0], *hidden.shape[1:]))
        all_gather(out, hidden.contiguous(), group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.in_order:
            return _ordered_reduce_scatter(gradient.contiguous(), ctx.group), None, None
        world = dist.get_world_size(ctx.group)
        out = gradient.new_empty((gradient.shape[0] // world, *gradient.shape[1:]))
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(out, gradient.contiguous(), group=ctx.group)
        return out, None, None


def reduce_gradient(hidden: Tensor, group: dist.ProcessGroup, *, in_order: bool = False) -> Tensor:
    """Return hidden; the backward pass all-reduces (sums) its gradient. For the inputs of column-parallel products.

    in_order: sum in rank order, by an all-to-all and an all-gather, so that a row's bits do not depend on other rows.
    """
    return _ReduceGradient.apply(hidden, group, in_order)


def gather_sequence(hidden: Tensor, group: dist.ProcessGroup, *, in_order: bool = False) -> Tensor:
    """All-gather [rows, H] to [W rows, H]; the backward pass reduce-scatters (sums), with in_order by an all-to-all."""
    return _GatherSequence.apply(hidden, group, in_order)
