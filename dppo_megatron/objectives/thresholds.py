"""What a token's divergence is held against: thresholds by direction, by position, by what came before; exemptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .inputs import Tokens
from .sequences import place_in_sequence, quantile_of_sequence, sum_before
from .settings import ObjectiveSettings

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def beyond_threshold(s: ObjectiveSettings, tokens: Tokens, divergence: Tensor, ratio: Tensor) -> Bool[Tensor, " T"]:
    """D > delta, with delta_low in place of delta where r < 1; both sides as the position in the response has them.

    Where there is no region, nothing is beyond it.
    """
    if s.measures_ratio and s.has_region:
        low, high = 1 - s.epsilon_low, 1 + s.epsilon_high
        return (ratio < low) | (ratio > high)
    if s.delta is None:
        return torch.zeros_like(divergence, dtype=torch.bool)
    threshold = torch.full_like(divergence, s.delta)
    if s.delta_low is not None:
        threshold = torch.where(ratio < 1, torch.full_like(threshold, s.delta_low), threshold)
    weighted = divergence
    if s.position_weight is not None or s.prefix_budget is not None:
        weight = position_weights(s, tokens)
        weighted = weight * divergence
        if s.prefix_budget is not None:
            threshold = torch.minimum(threshold, threshold + prefix_allowance(s, tokens, divergence, weight))
    beyond = weighted > threshold
    if s.free_low is not None or s.free_high is not None:  # BandPO's code: outside the ball and PPO's interval, too
        beyond = beyond & ((ratio < 1 - (s.free_low or 0)) | (ratio > 1 + (s.free_high or 0)))
    return beyond


def position_weights(s: ObjectiveSettings, tokens: Tokens) -> Float[Tensor, " T"]:
    """CPPO (arXiv 2606.10968):  w_t = 1 - (1 - w_min) (t - 1) / (T - 1)  for token t of a response of T."""
    least = 1.0 if s.position_weight is None else s.position_weight
    before, length = place_in_sequence(tokens)
    return 1 - (1 - least) * before.to(tokens.detached_logprob.dtype) / (length - 1).clamp(min=1)


def prefix_allowance(s: ObjectiveSettings, tokens: Tokens, divergence: Tensor, weight: Tensor) -> Float[Tensor, " T"]:
    """What the tokens before leave of the budget, CPPO:  b W_{t-1} - S_{t-1}.

    W and S are the sums of w and of w D over the tokens before t. b is the 0.9-quantile of D over the response, at
    least prefix_budget and at most prefix_budget_ceiling times that: 2 in the paper, 5 in its authors' code for verl.
    """
    most = (s.prefix_budget_ceiling or 2) * s.prefix_budget
    budget = quantile_of_sequence(divergence, 0.9, tokens).clamp(s.prefix_budget, most)
    return budget * sum_before(weight, tokens) - sum_before(weight * divergence, tokens)


def exempt(s: ObjectiveSettings, anchor: Tensor, ratio: Tensor) -> Bool[Tensor, " T"]:
    """Rare tokens without a region, mu < alpha, on the side asked for (DPPO, arXiv 2602.04879, relaxed clipping)."""
    rare = anchor.exp() < s.exempt_below
    if s.exempt_side == "both":
        return rare
    return rare & ((ratio < 1) if s.exempt_side == "low" else (ratio > 1))
