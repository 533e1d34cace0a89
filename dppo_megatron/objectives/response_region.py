"""A second region, of whole responses: where one has moved too far its tokens are dropped, whatever their own D."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import divergence as measure
from .inputs import Buckets, Tokens
from .sequences import largest_of_sequence, over_sequence
from .settings import ObjectiveSettings

if TYPE_CHECKING:
    from jaxtyping import Bool


@torch.no_grad()
def outside_response_region(s: ObjectiveSettings, tokens: Tokens, buckets: Buckets | None) -> Bool[Tensor, " T"]:
    """True where  mean_t D_t > delta  (or max_t)  over the response, and the token is one that the sign names.

    any: all of its tokens (TRM, arXiv 2512.23075; FlashREINFORCE). negative: A < 0 (off-policy sequence masking of
    DeepSeek-V3.2, arXiv 2512.02556: mean k1). harmful: A ln r > 0, those that diverge further (VACO, arXiv 2603.01365:
    mean |r - 1|). D is measured from mu.
    """
    divergence = measure.of_token(s.response_divergence, tokens.rollout_logprob, tokens.detached_logprob, buckets)
    if s.response_region == "mean":
        of_response = over_sequence(divergence, tokens, mean=True)
    else:
        of_response = largest_of_sequence(divergence, tokens)
    outside = (of_response > s.response_delta) & tokens.mask
    if s.response_sign == "negative":
        return outside & (tokens.advantage < 0)
    if s.response_sign == "harmful":
        return outside & (tokens.advantage * (tokens.detached_logprob - tokens.rollout_logprob) > 0)
    return outside
