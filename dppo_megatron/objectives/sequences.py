"""Reduce values over whole responses, or over the tokens before each token, on packed tokens.

Sequences are numbered from 0 and below T, and every sequence in a call is complete. A GPU adds in varying order, but
sums here have equal bits in any order. So a threshold gives equal results on all ranks with the same tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .inputs import Tokens

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_UNIT = 2.0**-32  # unit of running sums: 1e6 tokens of up to 1,000 each fit, each rounded to 2e-10


@torch.no_grad()
def over_sequence(value: Float[Tensor, " T"], tokens: Tokens, *, mean: bool) -> Float[Tensor, " T"]:
    """Return the sum or mean of `value` over each sequence's loss-carrying tokens, repeated for all its tokens."""
    ids = tokens.sequence_ids
    masked_value = torch.where(tokens.mask, value, torch.zeros_like(value)).double()
    zeros = masked_value.new_zeros(max(value.shape[0], 1))
    count = zeros.index_add(0, ids, tokens.mask.double())
    # Integers add exactly. A sequence gets units so small that `count` times the largest value fills 62 bits.
    finite = torch.where(masked_value.isfinite(), masked_value, 0.0)
    largest = zeros.scatter_reduce(0, ids, finite.abs(), "amax")
    units = 2.0**62 / (largest * count).clamp(min=1)
    total = zeros.long().index_add(0, ids, (finite * units[ids]).round().long()) / units
    total = total + zeros.index_add(0, ids, masked_value - finite)  # zeros, infinities and nan: exact in any order
    if mean:
        total = total / count.clamp(min=1)
    return total[ids].to(value.dtype)


@torch.no_grad()
def largest_of_sequence(value: Float[Tensor, " T"], tokens: Tokens) -> Float[Tensor, " T"]:
    """Return the largest `value` among each sequence's loss-carrying tokens, repeated for all its tokens."""
    lowest = torch.full_like(value, -torch.inf)
    masked_value = torch.where(tokens.mask, value, lowest)
    return lowest.scatter_reduce(0, tokens.sequence_ids, masked_value, "amax")[tokens.sequence_ids]


@torch.no_grad()
def sum_before(value: Float[Tensor, " T"], tokens: Tokens) -> Float[Tensor, " T"]:
    """Sum `value`, in [0, 1000], over the sequence's earlier loss-carrying tokens; each value is rounded to 2e-10."""
    order, first = _in_order(tokens)
    masked_value = torch.where(tokens.mask, value, torch.zeros_like(value))[order]
    units = (masked_value.double().nan_to_num(nan=0.0).clamp(max=1e3) / _UNIT).round().long()
    prefix_sums = units.cumsum(0) - units
    return _in_place((prefix_sums - prefix_sums[first]).double() * _UNIT, order).to(value.dtype)


@torch.no_grad()
def least_before(value: Float[Tensor, " T"], tokens: Tokens) -> Float[Tensor, " T"]:
    """Return the least `value` among the sequence's earlier loss-carrying tokens; +inf at the first."""
    order, first = _in_order(tokens)
    prefix_min = torch.where(tokens.mask, value, torch.full_like(value, torch.inf))[order]
    prefix_min = torch.cat([torch.full_like(prefix_min[:1], torch.inf), prefix_min[:-1]])
    place = torch.arange(len(order), device=order.device)
    prefix_min = torch.where(place > first, prefix_min, torch.inf)
    step = 1
    while step < len(order):  # each round doubles the distance looked back, never past the first
        reach = torch.where(place - step > first, place - step, place)
        prefix_min = torch.minimum(prefix_min, prefix_min[reach])
        step *= 2
    return _in_place(prefix_min, order)


@torch.no_grad()
def place_in_sequence(tokens: Tokens) -> tuple[Int[Tensor, " T"], Int[Tensor, " T"]]:
    """Return two counts of loss-carrying tokens per token: earlier in the sequence, and in the whole sequence."""
    ones = torch.ones_like(tokens.detached_logprob, dtype=torch.float64)
    return sum_before(ones, tokens).round().long(), over_sequence(ones, tokens, mean=False).round().long()


@torch.no_grad()
def quantile_of_sequence(value: Float[Tensor, " T"], q: float, tokens: Tokens) -> Float[Tensor, " T"]:
    """Return the q-quantile of `value`, linearly interpolated, over each sequence's loss-carrying tokens."""
    top = torch.where(tokens.mask, value, torch.full_like(value, torch.inf))
    by_value = top.argsort(stable=True)
    order = by_value[tokens.sequence_ids[by_value].argsort(stable=True)]
    ranked, first = top[order], _first(tokens.sequence_ids[order])
    last = (over_sequence(torch.ones_like(value), tokens, mean=False)[order] - 1).clamp(min=0)
    at = q * last.double()
    low = at.floor().long()
    high = torch.minimum(low + 1, last.long())
    lower, upper = ranked[first + low], ranked[first + high]
    quantile = torch.where(upper == lower, lower, lower + (upper - lower) * (at - low).to(value.dtype))
    return _in_place(quantile, order)


def _in_order(tokens: Tokens) -> tuple[Int[Tensor, " T"], Int[Tensor, " T"]]:
    """Sort tokens by sequence, then by position, or in the given order without positions. Returns two tensors:

    order   [T] token indices in sorted order
    first   [T] for each sorted token, the sorted place where the sequence starts
    """
    ids = tokens.sequence_ids
    if tokens.positions is None:
        order = ids.argsort(stable=True)
    else:
        by_position = tokens.positions.argsort(stable=True)
        order = by_position[ids[by_position].argsort(stable=True)]
    return order, _first(ids[order])


def _first(ids: Int[Tensor, " T"]) -> Int[Tensor, " T"]:
    return torch.searchsorted(ids, ids, right=False)


def _in_place(value: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(value).index_copy_(0, order, value)
