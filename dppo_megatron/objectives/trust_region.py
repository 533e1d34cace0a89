"""Apply the token trust region (ratio, divergence, direction, thresholds) and the response region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import divergence as measure
from .inputs import Buckets, Tokens
from .sequences import (
    largest_of_sequence,
    least_before,
    over_sequence,
    place_in_sequence,
    quantile_of_sequence,
    sum_before,
)
from .settings import ObjectiveSettings

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(frozen=True)
class Position:
    """Describes where each token is in the trust region. All fields are [T], without gradient.

    advantage: A.
    anchor, policy: ln anchor(a) and ln pi(a).
    base: ln p(a) in the importance ratio's denominator, which need not be the anchor.
    ratio: pi(a) / anchor(a) at the configured `ratio_level`.
    divergence: D, as the settings define it.
    exceeds: D is above the threshold.
    diverging: the update moves the token further from the anchor, and the region applies to the token.
    """

    advantage: Float[Tensor, " T"]
    anchor: Float[Tensor, " T"]
    base: Float[Tensor, " T"]
    policy: Float[Tensor, " T"]
    ratio: Float[Tensor, " T"]
    divergence: Float[Tensor, " T"]
    exceeds: Bool[Tensor, " T"]
    diverging: Bool[Tensor, " T"]

    @property
    def shift(self) -> Float[Tensor, " T"]:
        """Return pi(a) - anchor(a)."""
        return self.policy.exp() - self.anchor.exp()


@torch.no_grad()
def locate(s: ObjectiveSettings, tokens: Tokens, buckets: Buckets | None) -> Position:
    """Apply the trust-region axes. Without an anchor, which only a control without a region permits, D = 0."""
    anchor = logprob_of(s.anchor, tokens)
    policy = tokens.detached_logprob
    base = logprob_of(s.importance, tokens)
    base = policy if base is None else base
    if anchor is None:
        zeros = tokens.zeros
        return Position(tokens.advantage, policy, base, policy, zeros + 1, zeros, zeros.bool(), zeros.bool())
    ratio = ratio_to(anchor, s, tokens)
    divergence = _divergence(s, tokens, anchor, ratio, buckets)
    diverging = _diverging(s, tokens.advantage, ratio, buckets) & tokens.mask
    if s.exempt_below is not None:
        diverging = diverging & ~exempt(s, anchor, ratio)
    return Position(
        advantage=tokens.advantage,
        anchor=anchor,
        base=base,
        policy=policy,
        ratio=ratio,
        divergence=divergence,
        exceeds=beyond_threshold(s, tokens, divergence, ratio),
        diverging=diverging,
    )


def _divergence(
    s: ObjectiveSettings, tokens: Tokens, anchor: Tensor, ratio: Tensor, buckets: Buckets | None
) -> Float[Tensor, " T"]:
    """Return the divergence D between the anchor and pi. Top-K kinds need buckets."""
    if s.divergence == "ratio":
        return (ratio - 1).abs()
    return measure.token_divergence(s.divergence, anchor, tokens.detached_logprob, buckets)


def _diverging(s: ObjectiveSettings, advantage: Tensor, ratio: Tensor, buckets: Buckets | None) -> Bool[Tensor, " T"]:
    """Return whether the update moves pi further from the anchor.

    sampled: by the sampled token, A > 0 and r > 1 or A < 0 and r < 1 (DPPO, PPO).
    negative: only A < 0 and r < 1.
    predictive: by the predicted change of D (arXiv 2607.10848).
    symmetric: always, for either sign of A.
    """
    if s.direction == "symmetric":
        return torch.ones_like(advantage, dtype=torch.bool)
    raises = measure.predicted_change(buckets, s.tail) if s.direction == "predictive" else ratio - 1
    falling = (advantage < 0) & (raises < 0)
    return falling if s.direction == "negative" else ((advantage > 0) & (raises > 0)) | falling


def logprob_of(policy: str, tokens: Tokens) -> Float[Tensor, " T"] | None:
    """Return the sampled token's log-prob under an axis's policy, "rollout" or "old"; None if not given."""
    return tokens.old_logprob if policy == "old" else tokens.rollout_logprob


def ratio_to(base: Tensor, s: ObjectiveSettings, tokens: Tokens) -> Float[Tensor, " T"]:
    """Return pi(a) / base(a) at the configured `ratio_level`; `base` [T] is ln p.

    token: the token's ratio.
    sequence: the geometric mean over the response (GSPO, arXiv 2507.18071).
    product: the product over the response.
    prefix_minimum: the token's ratio times the least earlier ratio in the response, or 1 for the first token (MinPRO,
        arXiv 2601.22718).

    Example: token ratios [2, 0.5, 3] give product 3 and prefix_minimum [2, 1, 1.5].
    """
    log_ratio = tokens.detached_logprob - base
    if s.ratio_level in ("sequence", "product"):
        log_ratio = over_sequence(log_ratio, tokens, mean=s.ratio_level == "sequence")
    elif s.ratio_level == "prefix_minimum":
        prefix_min = least_before(log_ratio, tokens)
        log_ratio = log_ratio + torch.where(prefix_min.isinf(), torch.zeros_like(prefix_min), prefix_min)
    return log_ratio.exp()


def beyond_threshold(s: ObjectiveSettings, tokens: Tokens, divergence: Tensor, ratio: Tensor) -> Bool[Tensor, " T"]:
    """Return D > delta, where delta_low replaces delta if r < 1. For divergence 'ratio', return whether r is outside.

    position_weight scales D, prefix_budget may lower the threshold, and free_low and free_high exempt ratios near 1.
    Without a trust region, no token is beyond the threshold.
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
    exceeds = weighted > threshold
    if s.free_low is not None or s.free_high is not None:  # BandPO's code also requires r outside PPO's interval
        exceeds = exceeds & ((ratio < 1 - (s.free_low or 0)) | (ratio > 1 + (s.free_high or 0)))
    return exceeds


def position_weights(s: ObjectiveSettings, tokens: Tokens) -> Float[Tensor, " T"]:
    """Return CPPO's weights (arXiv 2606.10968):  w_t = 1 - (1 - w_min) (t - 1) / (T - 1)  for token t of T."""
    min_weight = 1.0 if s.position_weight is None else s.position_weight
    position, length = place_in_sequence(tokens)
    return 1 - (1 - min_weight) * position.to(tokens.detached_logprob.dtype) / (length - 1).clamp(min=1)


def prefix_allowance(s: ObjectiveSettings, tokens: Tokens, divergence: Tensor, weight: Tensor) -> Float[Tensor, " T"]:
    """Return the budget that the earlier tokens leave, CPPO:  b W_{t-1} - S_{t-1}.

    W and S sum w and w D over the tokens before t. b is the response's 0.9-quantile of D, at least prefix_budget and
    at most prefix_budget_ceiling times prefix_budget. The ceiling is 2 in the paper and 5 in the authors' verl code.
    """
    max_budget = (s.prefix_budget_ceiling or 2) * s.prefix_budget
    budget = quantile_of_sequence(divergence, 0.9, tokens).clamp(s.prefix_budget, max_budget)
    return budget * sum_before(weight, tokens) - sum_before(weight * divergence, tokens)


def exempt(s: ObjectiveSettings, anchor: Tensor, ratio: Tensor) -> Bool[Tensor, " T"]:
    """Return whether anchor(a) < exempt_below and r is on `exempt_side` (DPPO, arXiv 2602.04879, relaxed clip)."""
    rare = anchor.exp() < s.exempt_below
    if s.exempt_side == "both":
        return rare
    return rare & ((ratio < 1) if s.exempt_side == "low" else (ratio > 1))


@torch.no_grad()
def outside_response_region(s: ObjectiveSettings, tokens: Tokens, buckets: Buckets | None) -> Bool[Tensor, " T"]:
    """Return whether mean_t D_t (or max_t D_t) over the response exceeds delta, for tokens of the configured sign.

    any: all tokens (TRM, arXiv 2512.23075; FlashREINFORCE).
    negative: tokens with A < 0 (off-policy sequence masking in DeepSeek-V3.2, arXiv 2512.02556: mean k1).
    harmful: tokens with A ln r > 0, which diverge further (VACO, arXiv 2603.01365: mean |r - 1|).
    D is measured from mu.
    """
    divergence = measure.token_divergence(
        s.response_divergence, tokens.rollout_logprob, tokens.detached_logprob, buckets
    )
    if s.response_region == "mean":
        response_divergence = over_sequence(divergence, tokens, mean=True)
    else:
        response_divergence = largest_of_sequence(divergence, tokens)
    outside = (response_divergence > s.response_delta) & tokens.mask
    if s.response_sign == "negative":
        return outside & (tokens.advantage < 0)
    if s.response_sign == "harmful":
        return outside & (tokens.advantage * (tokens.detached_logprob - tokens.rollout_logprob) > 0)
    return outside
