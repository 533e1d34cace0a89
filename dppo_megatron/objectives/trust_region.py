"""Where each token stands in the trust region: its ratio, its divergence from the anchor, and the way it moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import divergence as measure
from .inputs import Buckets, Tokens
from .sequences import least_before, over_sequence
from .settings import ObjectiveSettings
from .thresholds import beyond_threshold, exempt

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(frozen=True)
class Position:
    """All [T], without gradient.

    advantage: A. anchor, policy: ln of anchor(a) and pi(a). base: ln p(a) of the policy that the importance ratio is
    taken to, which need not be the anchor. ratio: of the token, or at the level of the axis. divergence: D, as the
    settings choose it. beyond: D is above its threshold. diverging: the update moves the token further away from the
    anchor, and the region holds for it.
    """

    advantage: Float[Tensor, " T"]
    anchor: Float[Tensor, " T"]
    base: Float[Tensor, " T"]
    policy: Float[Tensor, " T"]
    ratio: Float[Tensor, " T"]
    divergence: Float[Tensor, " T"]
    beyond: Bool[Tensor, " T"]
    diverging: Bool[Tensor, " T"]

    @property
    def shift(self) -> Float[Tensor, " T"]:
        """pi(a) - anchor(a)."""
        return self.policy.exp() - self.anchor.exp()


@torch.no_grad()
def locate(s: ObjectiveSettings, tokens: Tokens, buckets: Buckets | None) -> Position:
    """Apply the axes of the region. Without an anchor, which only a control without a region permits, D = 0."""
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
        beyond=beyond_threshold(s, tokens, divergence, ratio),
        diverging=diverging,
    )


def _divergence(
    s: ObjectiveSettings, tokens: Tokens, anchor: Tensor, ratio: Tensor, buckets: Buckets | None
) -> Float[Tensor, " T"]:
    """D of pi from the anchor. Top-K kinds need buckets."""
    if s.divergence == "ratio":
        return (ratio - 1).abs()
    return measure.of_token(s.divergence, anchor, tokens.detached_logprob, buckets)


def _diverging(s: ObjectiveSettings, advantage: Tensor, ratio: Tensor, buckets: Buckets | None) -> Bool[Tensor, " T"]:
    """Whether the update moves pi further away from the anchor.

    sampled: by the sampled token, A > 0 and r > 1 or A < 0 and r < 1 (DPPO, PPO). negative: the second of the two
    alone. predictive: by the predicted change of D (arXiv 2607.10848). symmetric: always, whatever the sign of A.
    """
    if s.direction == "symmetric":
        return torch.ones_like(advantage, dtype=torch.bool)
    raises = measure.predicted_change(buckets, s.tail) if s.direction == "predictive" else ratio - 1
    falling = (advantage < 0) & (raises < 0)
    return falling if s.direction == "negative" else ((advantage > 0) & (raises > 0)) | falling


def logprob_of(policy: str, tokens: Tokens) -> Float[Tensor, " T"] | None:
    """ln p of the sampled token by the policy that an axis names, "rollout" or "old"; None if it was not given."""
    return tokens.old_logprob if policy == "old" else tokens.rollout_logprob


def ratio_to(base: Tensor, s: ObjectiveSettings, tokens: Tokens) -> Float[Tensor, " T"]:
    """pi(a) / base(a) at the level of the axis ratio_level; `base` [T] ln p.

    token: of the token. sequence: geometric mean over its response (GSPO, arXiv 2507.18071). product: the ratio of
    the whole response. prefix_minimum: of the token, times the least ratio of the tokens before it in its response,
    1 for the first (MinPRO, arXiv 2601.22718).
    """
    log_ratio = tokens.detached_logprob - base
    if s.ratio_level in ("sequence", "product"):
        log_ratio = over_sequence(log_ratio, tokens, mean=s.ratio_level == "sequence")
    elif s.ratio_level == "prefix_minimum":
        least = least_before(log_ratio, tokens)
        log_ratio = log_ratio + torch.where(least.isinf(), torch.zeros_like(least), least)
    return log_ratio.exp()
