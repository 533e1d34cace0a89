"""Compute the corrections around the trust region; all are off by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .inputs import Buckets, Tokens
from .sequences import over_sequence
from .settings import ObjectiveSettings

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

_LEAST_REST = 1e-8  # a smaller mass outside the top K carries no gradient
_FARTHEST = 10.0  # nats between pi and the other policy, beyond which k3 no longer grows with 1 / r


def sequence_ids_from_cu_seqlens(cu_seqlens: Int[Tensor, " B+1"], total: int) -> Int[Tensor, " T"]:
    """Return each token's sequence number for `total` packed tokens, from packed boundaries [B + 1] (first is 0)."""
    positions = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, positions, right=True) - 1


@torch.no_grad()
def mismatch_weight(s: ObjectiveSettings, tokens: Tokens) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """Return (multiplier of A r [T], dropped [T]) for the axis `mismatch`.

    The mismatch ratio is trainer / engine at the weights that sampled: old / mu if the old log-probs are given, else
    sg(pi) / mu, which also includes the drift of pi since then.
    truncate: TIS, min(ratio, high).
    mask: IcePop, the ratio inside [low, high] and 0 outside. If the importance ratio is already pi / mu, kept tokens
        have multiplier 1.
    """
    weight, dropped = tokens.zeros + 1, torch.zeros_like(tokens.mask)
    if s.mismatch == "none":
        return weight, dropped
    ratio = _at_level(s.mismatch_level, _mismatch(tokens), tokens)
    if s.mismatch == "truncate":
        return ratio.clamp(max=s.mismatch_high), dropped
    if s.importance == "old":
        weight = ratio
    dropped = _outside(ratio, s.mismatch_low, s.mismatch_high) & tokens.mask
    return torch.where(dropped, torch.zeros_like(weight), weight), dropped


@torch.no_grad()
def rejected(s: ObjectiveSettings, tokens: Tokens) -> Bool[Tensor, " T"]:
    """Return [T] bool: tokens in responses that `rejection`, or `outlier_low` and `outlier_high`, drop."""
    dropped = torch.zeros_like(tokens.mask)
    if s.rejection == "any_token":
        dropped = _any_outside(s.rejection_low, s.rejection_high, tokens)
    elif s.rejection != "none":
        dropped = _outside(_at_level(s.rejection, _mismatch(tokens), tokens), s.rejection_low, s.rejection_high)
    if s.drops_outliers:
        dropped = dropped | _any_outside(s.outlier_low, s.outlier_high, tokens)
    return dropped & tokens.mask


def reference_kl(s: ObjectiveSettings, tokens: Tokens, ratio: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return an estimate of KL(pi || reference) per token: k1, k2 or k3.

    Gradient 'unbiased': sg(r) (ln pi - ln ref) grad ln pi, the KL's gradient for samples drawn from mu (Tang and Munos,
    arXiv 2506.09477: it is k2's gradient, regardless of the reported estimator).
    Gradient 'estimator': the derivative of the estimator itself. For k1 this derivative is zero in expectation; for k3
    (GRPO's published term) it is the gradient of another divergence.
    ratio: [T] r, detached and capped as in the policy term.
    """
    gap = tokens.logprob - tokens.reference_logprob
    if s.reference_kl == "k1":
        value = gap
    elif s.reference_kl == "k2":
        value = 0.5 * gap.square()
    else:
        value = _k3(gap)
    if s.reference_kl_gradient == "estimator":
        return value
    coefficient = ratio * gap.detach()
    return value.detach() + coefficient * (tokens.logprob - tokens.detached_logprob)


def rollout_kl(s: ObjectiveSettings, tokens: Tokens, buckets: Buckets | None) -> Float[Tensor, " T"]:
    """Return the KL to the rollout policy on every loss-carrying token, with gradient; r is the token's pi / mu.

    squared: (ln r)^2 (Kimi K2.5, arXiv 2602.02276; DRO has half of this).
    k3: ln r + 1 / r - 1 (P3O, arXiv 2605.12380), bounded as in the authors' code.
    topk_squared: sum over S and the rest of mu (ln r)^2 (prime-rl's distributional IPO), S as in `Buckets`.
    """
    if s.rollout_kl == "topk_squared":
        return _expected_square(tokens, buckets)
    log_ratio = tokens.logprob - tokens.rollout_logprob
    if s.rollout_kl == "squared":
        return log_ratio.square()
    return _k3(log_ratio)


def _k3(log_ratio: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return ln r + 1 / r - 1, with 1 / r in [e^-10, e^10] so that no token that pi has left outweighs the batch."""
    return torch.expm1((-log_ratio).clamp(-_FARTHEST, _FARTHEST)) + log_ratio


def _expected_square(tokens: Tokens, buckets: Buckets) -> Float[Tensor, " T"]:
    gap = torch.where(buckets.present, buckets.policy_logprob - buckets.anchor_logprob, 0.0)
    inside = (buckets.anchor * gap.square()).sum(dim=1)
    # pi's mass outside S takes the value from `policy_other_logprob` and the gradient from 1 - sum(pi over S). mu's
    # mass is 1 minus a sum near 1, so it is computed in float64.
    mass = buckets.policy.sum(dim=1)
    rest = (buckets.policy_other_logprob.exp() - (mass - mass.detach())).clamp(min=_LEAST_REST).log()
    anchor = (buckets.anchor_logprob.double().exp() * buckets.present).sum(dim=1)
    anchor_rest = (1 - anchor).clamp(min=0.0).to(rest.dtype)
    outside = anchor_rest * (rest - anchor_rest.clamp(min=_LEAST_REST).log()).square()
    return torch.where(tokens.mask, inside + outside, 0.0)


def keep_finished(truncated: Bool[Tensor, " B"], response_lengths: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return the loss-carrying lengths with truncated responses set to 0 (overlong filtering, DAPO, arXiv 2503.14476).

    Use the result for both the mask and the counts, so that the denominators also exclude filtered responses. Example:
    truncated [False, True] and lengths [3, 8] give [3, 0].
    """
    return torch.where(truncated, torch.zeros_like(response_lengths), response_lengths)


def soft_overlong_penalty(response_lengths: Int[Tensor, " B"], max_length: int, buffer: int) -> Float[Tensor, " B"]:
    """Return the penalty to add to the reward: 0 up to max_length - buffer, then linear to -1 at max_length, -1 beyond.

    DAPO (arXiv 2503.14476) eq. 13. Example: max_length 100, buffer 20 and length 90 give -0.5.
    Raises ValueError unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer} must be above 0 and at most max_length={max_length}")
    excess = response_lengths.to(torch.float32) - (max_length - buffer)
    return -(excess / buffer).clamp(0.0, 1.0)


def _at_level(level: str, log_ratio: Tensor, tokens: Tokens) -> Tensor:
    if level == "token":
        return log_ratio.exp()
    return over_sequence(log_ratio, tokens, mean=level == "geometric").exp()


def _mismatch(tokens: Tokens) -> Tensor:
    trainer = tokens.detached_logprob if tokens.old_logprob is None else tokens.old_logprob
    return trainer - tokens.rollout_logprob


def _any_outside(low: float | None, high: float | None, tokens: Tokens) -> Tensor:
    bad = _outside(_mismatch(tokens).exp(), low, high)
    return over_sequence(bad.to(tokens.detached_logprob.dtype), tokens, mean=False) > 0


def _outside(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if low is not None:
        outside = outside | (ratio < low)
    if high is not None:
        outside = outside | (ratio > high)
    return outside
