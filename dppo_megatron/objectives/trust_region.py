"""Which tokens are outside the trust region, and what that does to their gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import divergence as measure
from .inputs import Buckets, Tokens
from .settings import ObjectiveSettings

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(frozen=True)
class Region:
    """Where the tokens are. All [T].

    divergence: D. outside: D is above its threshold on the side that the direction calls harmful.
    weight: multiplier of A r in the gradient. shift: signed distance from the anchor over its threshold.
    held: ratio that stands in the loss value of a clipped token; None unless a ratio is clipped.
    """

    divergence: Float[Tensor, " T"]
    outside: Bool[Tensor, " T"]
    weight: Float[Tensor, " T"]
    shift: Float[Tensor, " T"]
    held: Float[Tensor, " T"] | None


@torch.no_grad()
def find_region(s: ObjectiveSettings, tokens: Tokens, anchor_ratio: Tensor | None, buckets: Buckets | None) -> Region:
    """Apply the axes divergence, direction and control.

    anchor_ratio [T]: pi(a) / anchor(a), of the token or of the response; None when there is no anchor to
    measure against, which only control 'none' permits.
    """
    zeros = tokens.zeros
    if anchor_ratio is None:
        return Region(zeros, zeros.bool(), zeros + 1, zeros, None)
    positive, negative = tokens.advantage > 0, tokens.advantage < 0
    divergence = distance(s.divergence, s.anchor, tokens, anchor_ratio, buckets)
    if s.control == "none":
        return Region(divergence, zeros.bool(), zeros + 1, zeros, None)

    if s.measures_ratio:
        lower, upper = 1 - s.epsilon_low, 1 + s.epsilon_high
        beyond = (anchor_ratio < lower) | (anchor_ratio > upper)
        shift = anchor_ratio - 1
        shift = torch.where(shift > 0, shift / s.epsilon_high, shift / s.epsilon_low)
    else:
        beyond = divergence > s.delta
        shift = (tokens.policy.exp() - anchor_logprob(s.anchor, tokens).exp()) / (s.penalty_delta or s.delta)

    if s.direction == "symmetric":
        harmful = torch.ones_like(beyond)
    elif s.direction == "predictive":
        change = measure.predicted_change(buckets, s.tail)
        harmful = (positive & (change > 0)) | (negative & (change < 0))
    else:
        harmful = (positive & (anchor_ratio > 1)) | (negative & (anchor_ratio < 1))
    outside = beyond & harmful & tokens.mask

    # d/d ln pi of r A - |A|/2 shift (r - 1) is A r (1 - sign(A) shift): SPO with the shift of the ratio, DRPO
    # with that of a probability.
    pulled = 1 - tokens.advantage.sign() * shift
    if s.divergence == "topk_tv":
        pulled = zeros + 1  # the top-K penalty is a term of its own, see topk_penalty
    held = None
    if s.control == "mask":
        weight = (~outside).to(zeros.dtype)
        if s.measures_ratio:
            held = anchor_ratio.clamp(lower, upper)
            if s.dual_clip is not None:
                runaway = negative & (anchor_ratio > s.dual_clip) & tokens.mask
                weight, outside = torch.where(runaway, zeros, weight), outside | runaway
                held = torch.where(runaway, s.dual_clip, held)
    elif s.control == "quadratic":
        weight, outside = pulled, torch.zeros_like(outside)
    else:
        weight = torch.where(outside, pulled, zeros + 1)
    return Region(divergence, outside, weight, shift, held)


def distance(kind: str, anchor: str, tokens: Tokens, anchor_ratio: Tensor, buckets: Buckets | None) -> Tensor:
    """The divergence `kind` [T] of pi from the anchor. Top-K kinds need buckets."""
    ln_mu = anchor_logprob(anchor, tokens)
    if kind == "ratio":
        return (anchor_ratio - 1).abs()
    if kind == "binary_tv":
        return measure.binary_tv(ln_mu, tokens.policy)
    if kind == "binary_kl":
        return measure.binary_kl(ln_mu, tokens.policy)
    return measure.topk_tv(buckets) if kind == "topk_tv" else measure.topk_kl(buckets)


def anchor_logprob(anchor: str, tokens: Tokens) -> Tensor | None:
    return tokens.old_logprob if anchor == "old" else tokens.rollout_logprob


def topk_penalty(s: ObjectiveSettings, tokens: Tokens, region: Region, buckets: Buckets) -> Float[Tensor, " T"]:
    """|A| / (2 delta) sum over S and the rest of (pi - mu)^2, with gradient. Ours, experimental, in no paper.

    DRPO's penalty |A| / (2 delta) mu(a) (r - 1)^2 is one draw, a from mu, of |A| / (2 delta) sum (pi - mu)^2.
    This is that sum over the listed tokens, instead of the draw. The unlisted mass counts as one token; its
    gradient is minus that of the listed masses, so the kernel needs no gradient for `other`.
    """
    scale = tokens.advantage.abs() / (2 * (s.penalty_delta or s.delta))
    policy = buckets.policy
    listed = policy.sum(dim=1)
    other = buckets.policy_other_logprob.exp() - (listed - listed.detach())
    squares = (policy - buckets.anchor).square().sum(dim=1) + (other - buckets.anchor_other).square()
    penalty = scale * squares
    if s.control == "mask_quadratic":
        penalty = torch.where(region.outside, penalty, torch.zeros_like(penalty))
    return penalty
