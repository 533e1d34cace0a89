"""Where each token stands in the trust region: its ratio, its divergence from the anchor, and the way it moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import divergence as measure
from .corrections import over_sequence
from .inputs import Buckets, Tokens
from .settings import ObjectiveSettings

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(frozen=True)
class Position:
    """All [T], without gradient.

    advantage: A. ratio: pi(a) / anchor(a), of the token or of the response. shift: pi(a) - anchor(a).
    divergence: D, as the settings choose it. diverging: the update moves the token further away from the anchor.
    """

    advantage: Float[Tensor, " T"]
    ratio: Float[Tensor, " T"]
    shift: Float[Tensor, " T"]
    divergence: Float[Tensor, " T"]
    diverging: Bool[Tensor, " T"]


@torch.no_grad()
def locate(s: ObjectiveSettings, tokens: Tokens, buckets: Buckets | None) -> Position:
    """Apply the axes anchor, divergence and direction. Without an anchor, which only control 'none' permits, D = 0."""
    anchor = logprob_of(s.anchor, tokens)
    if anchor is None:
        zeros = tokens.zeros
        return Position(tokens.advantage, zeros + 1, zeros, zeros, zeros.bool())
    ratio = ratio_to(anchor, s, tokens)
    return Position(
        advantage=tokens.advantage,
        ratio=ratio,
        shift=tokens.detached_logprob.exp() - anchor.exp(),
        divergence=_divergence(s, tokens, anchor, ratio, buckets),
        diverging=_diverging(s, tokens.advantage, ratio, buckets) & tokens.mask,
    )


def _divergence(
    s: ObjectiveSettings, tokens: Tokens, anchor: Tensor, ratio: Tensor, buckets: Buckets | None
) -> Float[Tensor, " T"]:
    """D of pi from the anchor. Top-K kinds need buckets."""
    if s.divergence == "ratio":
        return (ratio - 1).abs()
    if s.divergence == "binary_tv":
        return measure.binary_tv(anchor, tokens.detached_logprob)
    if s.divergence == "binary_kl":
        return measure.binary_kl(anchor, tokens.detached_logprob)
    return measure.topk_tv(buckets) if s.divergence == "topk_tv" else measure.topk_kl(buckets)


def _diverging(s: ObjectiveSettings, advantage: Tensor, ratio: Tensor, buckets: Buckets | None) -> Bool[Tensor, " T"]:
    """Whether the update moves pi further away from the anchor.

    sampled: by the sampled token, A > 0 and r > 1 or A < 0 and r < 1 (DPPO, PPO). predictive: by the predicted change
    of D (arXiv 2607.10848). symmetric: always, whatever the sign of A.
    """
    if s.direction == "symmetric":
        return torch.ones_like(advantage, dtype=torch.bool)
    raises = measure.predicted_change(buckets, s.tail) if s.direction == "predictive" else ratio - 1
    return ((advantage > 0) & (raises > 0)) | ((advantage < 0) & (raises < 0))


def logprob_of(policy: str, tokens: Tokens) -> Float[Tensor, " T"] | None:
    """ln p of the sampled token by the policy that an axis names, "rollout" or "old"; None if it was not given."""
    return tokens.old_logprob if policy == "old" else tokens.rollout_logprob


def ratio_to(base: Tensor, s: ObjectiveSettings, tokens: Tokens) -> Float[Tensor, " T"]:
    """pi(a) / base(a), of the token or the geometric mean over its response; `base` [T] ln p."""
    log_ratio = tokens.detached_logprob - base
    if s.ratio_level == "sequence":
        log_ratio = over_sequence(log_ratio, tokens, mean=True)
    return log_ratio.exp()
