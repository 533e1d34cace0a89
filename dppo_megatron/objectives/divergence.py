"""Compute divergences D(mu || pi) at each position, from the log-probs of the given tokens, without gradient.

The binary and top-K kinds are lower bounds: binary <= top-K <= full vocabulary, because merging outcomes never raises a
divergence. No constant is added inside a logarithm, because it would bias the tail exactly where p nears 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .inputs import Buckets
from .settings import ObjectiveError

if TYPE_CHECKING:
    from jaxtyping import Float

_LN2 = math.log(2.0)


def log1mexp(logprob: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """Return ln(1 - e^x) for x <= 0 without cancellation: expm1 near 0, log1p below -ln 2."""
    near_one = logprob > -_LN2
    high = torch.where(near_one, logprob, torch.full_like(logprob, -1.0))
    low = torch.where(near_one, torch.full_like(logprob, -1.0), logprob)
    return torch.where(near_one, (-torch.expm1(high)).log(), torch.log1p(-low.exp()))


def token_divergence(
    kind: str, anchor: Float[Tensor, " T"], policy: Float[Tensor, " T"], buckets: Buckets | None
) -> Float[Tensor, " T"]:
    """Return the divergence `kind` at each position, from ln mu(a) and ln pi(a), or from the top K.

    k1, k2, k3 are estimates of KL(mu || pi) from the sampled token: -ln r, (ln r)^2 / 2 and r - 1 - ln r.
    """
    if kind in ("k1", "k2", "k3", "ratio"):
        log_ratio = policy - anchor
        return {
            "k1": lambda: -log_ratio,
            "k2": lambda: 0.5 * log_ratio.square(),
            "k3": lambda: torch.expm1(log_ratio) - log_ratio,
            "ratio": lambda: torch.expm1(log_ratio).abs(),
        }[kind]()
    if kind in ("binary_tv", "binary_kl"):
        return (binary_tv if kind == "binary_tv" else binary_kl)(anchor, policy)
    if kind == "kl_either":
        return torch.maximum(binary_kl(anchor, policy), binary_kl(policy, anchor))
    return topk_tv(buckets) if kind == "topk_tv" else topk_kl(buckets)


def binary_tv(anchor: Float[Tensor, " T"], policy: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return |mu(a) - pi(a)| from ln mu(a) and ln pi(a). DPPO (arXiv 2602.04879), binary approximation."""
    return (policy.exp() - anchor.exp()).abs()


def binary_kl(anchor: Float[Tensor, " T"], policy: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return mu ln(mu/pi) + (1-mu) ln((1-mu)/(1-pi)) from ln mu(a) and ln pi(a). DPPO, binary approximation.

    1 - p below one rounding step of p is unknown, so both complements stop there instead of at zero. Otherwise an fp32
    log-prob that rounded to 0 would give an infinite divergence.
    """
    max_logprob = -torch.finfo(policy.dtype).eps
    mu_rest = anchor.clamp(max=max_logprob)
    pi_rest = policy.clamp(max=max_logprob)
    inside = _times_log_ratio(anchor.exp(), anchor, policy)
    outside = -torch.expm1(mu_rest) * (log1mexp(mu_rest) - log1mexp(pi_rest))
    return (inside + outside).clamp(min=0.0)


def topk_tv(buckets: Buckets) -> Float[Tensor, " T"]:
    """Return 1/2 sum over S and the rest of |mu - pi|, S = TopK(mu, K) united with {a}. DPPO, top-K."""
    inside = (buckets.policy.detach() - buckets.anchor).abs().sum(dim=1)
    return 0.5 * (inside + (buckets.policy_other_logprob.exp() - buckets.anchor_other).abs())


def topk_kl(buckets: Buckets) -> Float[Tensor, " T"]:
    """Return the sum over S and the rest of mu ln(mu/pi). DPPO, top-K approximation.

    The rest is left out where mu's mass outside S is below the rounding of 1 - sum(mu).
    """
    inside = _times_log_ratio(buckets.anchor, buckets.anchor_logprob, buckets.policy_logprob.detach()).sum(dim=1)
    rest = _times_log_ratio(buckets.anchor_other, buckets.anchor_other_logprob, buckets.policy_other_logprob)
    return (inside + rest).clamp(min=0.0)


def predicted_change(buckets: Buckets, tail: str) -> Float[Tensor, " T"]:
    """Return the change of D when the sampled token's logit is raised: (pi_a - mu_a) + sum_i pi_i (mu_i - pi_i).

    The sum runs over S. The mass outside S counts as one token ('aggregated') or is spread evenly over the tokens there
    ('uniform', needs TopKLogprobs.vocab_size). Predictive divergence masks, arXiv 2607.10848.
    """
    mu, pi = buckets.anchor, buckets.policy.detach()
    pi_other = buckets.policy_other_logprob.exp()
    rest = pi_other * (buckets.anchor_other - pi_other)
    if tail == "uniform":
        if buckets.vocab_size is None:
            raise ObjectiveError("tail='uniform' needs TopKLogprobs.vocab_size")
        rest = rest / (buckets.vocab_size - buckets.present.sum(dim=1)).clamp(min=1)
    return (pi[:, -1] - mu[:, -1]) + (pi * (mu - pi)).sum(dim=1) + rest


def _times_log_ratio(mu: Tensor, ln_mu: Tensor, ln_pi: Tensor) -> Tensor:
    """Return mu (ln mu - ln pi), and 0 where mu is 0, for any logarithms."""
    has_mass = mu > 0
    gap = torch.where(has_mass, ln_mu, 0.0) - torch.where(has_mass, ln_pi, 0.0)
    return mu * gap
