"""Compute a token's policy term: importance ratio, control, and the value and slope of the loss."""

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
    """Contains the parts of the policy term, all [T] and without gradient except `controlled.penalty`.

    ratio: r before floor and cap.
    used_ratio: r after floor and cap.
    weight: the control's w, 0 where a bound cut the gradient.
    """

    position: Position
    ratio: Float[Tensor, " T"]
    used_ratio: Float[Tensor, " T"]
    controlled: Controlled
    weight: Float[Tensor, " T"]


def policy_term(
    s: ObjectiveSettings, tokens: Tokens, buckets: Buckets | None, effective_size: Tensor | None = None
) -> PolicyTerm:
    """Apply the ratio and region axes. effective_size: 0-d, caps r if the settings require it."""
    position = locate(s, tokens, buckets)
    ratio = _importance_ratio(s, tokens)
    used_ratio = truncated(s, ratio, tokens.advantage, effective_size) if s.truncates else ratio
    controlled = CONTROLS[s.control, s.divergence](s, position, used_ratio, buckets)
    weight = controlled.weight
    if s.path == "ratio":  # a capped ratio is constant
        weight = torch.where(used_ratio == ratio, weight, torch.zeros_like(weight))
    return PolicyTerm(position, ratio, used_ratio, controlled, weight)


def truncated(
    s: ObjectiveSettings, ratio: Tensor, advantage: Tensor, effective_size: Tensor | None
) -> Float[Tensor, " T"]:
    """Return r within floor and cap, which may differ where A < 0 (DISPO, arXiv 2602.00983; TOPR, arXiv 2503.14286).

    P3O (arXiv 2605.12380) caps r at the batch's effective share of samples.
    """
    used_ratio = ratio
    if s.ratio_floor is not None or s.ratio_cap is not None:
        used_ratio = ratio.clamp(s.ratio_floor, s.ratio_cap)
    if s.ratio_floor_negative is not None or s.ratio_cap_negative is not None:
        used_ratio = torch.where(advantage < 0, ratio.clamp(*negative_bounds(s)), used_ratio)
    if effective_size is not None:
        used_ratio = torch.minimum(used_ratio, effective_size.to(used_ratio.dtype))
    return used_ratio


def term_slope(coefficient: Tensor, advantage: Tensor) -> Float[Tensor, " T"]:
    """Return the slope A r w:  d loss / d ln pi(a) = - A r w,  with coefficient = r w.

    The slope is 0 where r w or A is 0, even if the other factor is infinite. Example: r w [1.5, 0, inf] and A [2, 2, 0]
    give [3, 0, 0].
    """
    return product(coefficient, advantage)


def term_value(
    s: ObjectiveSettings, term: PolicyTerm, correction: Tensor, slope: Tensor, tokens: Tokens
) -> Float[Tensor, " T"]:
    """Return the value of the policy term, without gradient.

        path 'ratio', 'through':  - L c,  with the control's L and the correction c;  0 where c or A is 0
        path 'logprob':           - A r w ln pi(a),  0 where A r w is 0

    Example: A = 2, r = 1.5, w = c = 1 give L = 3 and slope 3. At pi(a) = 0.5 the value is -3 on path 'ratio' and
    -3 ln 0.5 = 2.08 on path 'logprob'. PPO clips r to 1.2: w = 0, L = 2.4, and the values are -2.4 and 0.
    """
    if s.path == "logprob":
        return -slope * tokens.detached_logprob
    return product(term.controlled.loss, correction * (tokens.advantage != 0))


def join(value: Tensor, slope: Tensor, tokens: Tokens) -> Float[Tensor, " T"]:
    """Return  value - slope (ln pi(a) - sg ln pi(a)):  equal to `value`, with the gradient -slope grad ln pi(a).

    The bracket is 0 and has the gradient grad ln pi(a), so the published value does not affect the gradient. Example:
    value [-3, -2.4] and slope [3, 0] from `term_value` give the loss [-3, -2.4] and d loss / d ln pi(a) = [-3, 0].
    """
    return value - slope * (tokens.logprob - tokens.detached_logprob)


def weight_over_plain_ratio(
    s: ObjectiveSettings, tokens: Tokens, term: PolicyTerm, coefficient: Tensor, w: Tensor
) -> Float[Tensor, " T"]:
    """Return coefficient / r with the token's r = pi(a)/mu(a); exactly w where no other ratio is used."""
    if s.importance == "none":
        weight = w
    elif s.importance == "rollout" and s.ratio_level == "token":
        weight = torch.where(term.used_ratio == term.ratio, w, coefficient / term.ratio)
    else:
        base = tokens.old_logprob if tokens.rollout_logprob is None else tokens.rollout_logprob
        weight = coefficient / (tokens.detached_logprob - base).exp()
    return torch.where(tokens.mask, weight, torch.zeros_like(weight))


def product(value: Tensor, factor: Tensor) -> Tensor:
    """Return value * factor, and 0 where factor is 0, so that a dropped token adds 0 even if the ratio overflows."""
    return torch.where(factor == 0, torch.zeros_like(value), value * factor)


def _importance_ratio(s: ObjectiveSettings, tokens: Tokens) -> Tensor:
    """Return r = pi(a) / mu(a), or pi(a) / old(a), before cap and floor; 1 without importance sampling."""
    if s.importance == "none":
        return torch.ones_like(tokens.detached_logprob)
    return ratio_to(logprob_of(s.importance, tokens), s, tokens)
