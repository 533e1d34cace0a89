"""Compute the batch statistic that some methods need before the first micro-batch.

A trainer adds the `sums` over all ranks and micro-batches, and passes the total to the objective:

    sums = objective.statistic_sums(old_logprob, rollout_logprob, advantage, mask)   # of each micro-batch; add them
    objective = objective.with_statistic(sums)

Without this statistic, an objective treats each call's tokens as the batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_FARTHEST = 300.0  # nats: e^600 summed over 1e40 tokens is finite in fp64, and e^-600 is above 0
_KEPT = math.log(0.7), math.log(1.5)  # M2PO's released code clips no token with ln r between these values
_BITS = 16  # leading bits of a non-negative fp32: as integers they sort like the number, in bins below 0.8 % wide


def statistic_sums(
    kind: str, log_ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"], mask: Bool[Tensor, " T"]
) -> Float[Tensor, " n"]:
    """Return fp64 sums to add over all tokens of the batch; log_ratio = ln old - ln mu of the sampled tokens."""
    if kind != "effective_size":
        mask = mask & _moving_away(log_ratio, advantage)
    log_ratio = torch.where(mask, log_ratio, torch.zeros_like(log_ratio)).double()
    if kind == "effective_size":
        ratio = torch.where(mask, log_ratio.clamp(-_FARTHEST, _FARTHEST).exp(), torch.zeros_like(log_ratio))
        return torch.stack([ratio.sum(), ratio.square().sum(), mask.sum().double()])
    squares = log_ratio.square()
    bins = _bin(squares)
    zeros = torch.zeros(2**_BITS // 2, dtype=torch.float64, device=squares.device)
    counts = zeros.index_add(0, bins, mask.double())
    return torch.cat([counts, zeros.index_add(0, bins, torch.where(mask, squares, 0.0))])


def statistic_value(kind: str, sums: Float[Tensor, " n"], budget: float | None) -> Float[Tensor, ""]:
    """Return the statistic, 0-d.

    effective_size: (sum r)^2 / (n sum r^2), r = old / mu within e^-300 and e^300, in (0, 1]; 1 for an empty batch (P3O,
        arXiv 2605.12380).
    second_moment: the first bin of (ln r)^2 to drop, so that the mean of (ln r)^2 over the bins below stays below the
        budget. Only tokens that PPO could clip count: A > 0 and r > 1, or A < 0 and r < 1 (M2PO, arXiv 2510.01161).
        Tokens in a bin differ by less than 0.8 %.
    second_moment_clip: the first bin above t^2, for the largest t that keeps the mean of min((ln r)^2, t^2) over these
        tokens below the budget (M2PO's released code).
    """
    if kind == "effective_size":
        total, squares, count = sums
        return torch.where(count > 0, total * total / (count * squares).clamp(min=1e-300), torch.ones_like(total))
    bin_sums = sums.view(2, -1)
    counts, totals = bin_sums.cumsum(1)
    if kind == "second_moment_clip":
        edges = (torch.arange(len(counts), dtype=torch.int32) << (32 - _BITS)).view(torch.float32).to(counts)
        smaller, moment = torch.stack([counts, totals]) - bin_sums  # sums over the bins below an edge
        return (moment + edges * (counts[-1] - smaller) < budget * counts[-1]).long().sum()
    within = totals < budget * counts.clamp(min=1e-300)
    # Bins are sorted by size, so the mean over lower bins grows with the bound: the cut is after the last bin within.
    within = within | (counts == 0)
    return within.long().sum()


def beyond_budget(kind: str, log_ratio: Tensor, advantage: Float[Tensor, " T"], cut: Tensor) -> Bool[Tensor, " T"]:
    """Return whether a token moves away with (ln r)^2 at or above the cut and, for the clip, ln r outside `_KEPT`."""
    exceeds = _moving_away(log_ratio, advantage) & (_bin(log_ratio.double().square()) >= cut)
    if kind == "second_moment_clip":
        exceeds = exceeds & ((log_ratio < _KEPT[0]) | (log_ratio > _KEPT[1]))
    return exceeds


def _moving_away(log_ratio: Tensor, advantage: Tensor) -> Bool[Tensor, " T"]:
    return advantage * log_ratio > 0


def _bin(squares: Tensor) -> Tensor:
    return squares.float().view(torch.int32).long() >> (32 - _BITS)
