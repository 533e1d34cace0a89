"""The policy term of a token: its importance ratio, what the control makes of it, and so r w, what multiplies A."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .controls import CONTROLS, Controlled
from .inputs import Buckets, Tokens
from .rules import negative_bounds
from .settings import ObjectiveSettings
from .trust_region import Position, locate, logprob_of, ratio_to

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class PolicyTerm:
    """All [T] and without gradient but for `controlled.penalty`. ratio: r before its bounds. used: after.

    weight: w of the control, 0 where a bound has taken the gradient.
    """

    position: Position
    ratio: Float[Tensor, " T"]
    used: Float[Tensor, " T"]
    controlled: Controlled
    weight: Float[Tensor, " T"]


def policy_term(
    s: ObjectiveSettings, tokens: Tokens, buckets: Buckets | None, effective_size: Tensor | None = None
) -> PolicyTerm:
    """Apply the axes of the ratio and of the region. effective_size: 0-d, caps r where the settings ask for it."""
    position = locate(s, tokens, buckets)
    ratio = _importance_ratio(s, tokens)
    used = truncated(s, ratio, tokens.advantage, effective_size) if s.truncates else ratio
    controlled = CONTROLS[s.control, s.divergence](s, position, used, buckets)
    weight = controlled.weight
    if s.path == "ratio":  # a truncated ratio is constant
        weight = torch.where(used == ratio, weight, torch.zeros_like(weight))
    return PolicyTerm(position, ratio, used, controlled, weight)


def truncated(
    s: ObjectiveSettings, ratio: Tensor, advantage: Tensor, effective_size: Tensor | None
) -> Float[Tensor, " T"]:
    """r within its floor and cap, which may differ where A < 0 (DISPO, arXiv 2602.00983; TOPR, arXiv 2503.14286).

    P3O (arXiv 2605.12380) caps it at the effective share of the batch's samples.
    """
    used = ratio
    if s.ratio_floor is not None or s.ratio_cap is not None:
        used = ratio.clamp(s.ratio_floor, s.ratio_cap)
    if s.ratio_floor_negative is not None or s.ratio_cap_negative is not None:
        used = torch.where(advantage < 0, ratio.clamp(*negative_bounds(s)), used)
    if effective_size is not None:
        used = torch.minimum(used, effective_size.to(used.dtype))
    return used


def product(value: Tensor, factor: Tensor) -> Tensor:
    """value * factor, and 0 where factor is 0: a token that was taken out stays out, though its ratio overflows."""
    return torch.where(factor == 0, torch.zeros_like(value), value * factor)


def _importance_ratio(s: ObjectiveSettings, tokens: Tokens) -> Tensor:
    """r = pi(a) / mu(a), or to the old policy, before cap and floor; 1 without importance sampling."""
    if s.importance == "none":
        return torch.ones_like(tokens.detached_logprob)
    return ratio_to(logprob_of(s.importance, tokens), s, tokens)
