"""Center scores (arXiv 2609.20807): subtract the rollout policy's expectation from each token's weighted score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .contract import TopKLogprobs
from .corrections import mismatch_weight
from .inputs import Tokens
from .policy_term import policy_term, product
from .settings import ObjectiveSettings

if TYPE_CHECKING:
    from jaxtyping import Float

_LEAST_TAIL = 1e-6  # least mass of pi and mu outside the list (appendix A.3), the precision of 1 - mu(H) in fp32
_FARTHEST = 80.0  # nats by which pi may exceed mu in the list, so that mu r stays finite


@dataclass(frozen=True)
class Centering:
    """Contains the centering term of every token. All fields are [T], and only `score` has a gradient.

    score: sum_H sg(mu_v c_v - alpha pi_v) ln pi_v.
    mass, anchor_mass: pi's and mu's mass on the list H.
    size: sum_H of the coefficients' absolute values, 0 on policy.
    """

    score: Float[Tensor, " T"]
    mass: Float[Tensor, " T"]
    anchor_mass: Float[Tensor, " T"]
    size: Float[Tensor, " T"]


def expected_score(
    s: ObjectiveSettings, tokens: Tokens, topk: TopKLogprobs, effective_size: Tensor | None
) -> Centering:
    """Return the score that mu expects, to be subtracted.

    The policy term's gradient is A c_a grad ln pi(a), c = r w. Its expectation under mu is A sum_v mu_v c_v grad ln
    pi_v. The sum runs over the engine's list H without changes. H is never united with the sampled token, because a
    list that depends on the sample would not be centered in expectation. Outside H, mu is taken as pi scaled to mu's
    mass there (eq. 7-12). With sum_v pi_v grad ln pi_v = 0 this leaves

        sum_H sg(mu_v c_v - alpha pi_v) ln pi_v,   alpha = rho c(1 / rho),   rho = (1 - mu(H)) / (1 - pi(H)).

    c_v is the coefficient that token v would get if it was sampled with this A. The tail's c is computed for a token
    with the tail's ratio and mean mass (or all the mass where topk.vocab_size is None). Otherwise a region in
    probabilities would take the whole tail for a single token that moved far. With a quadratic control only the ratio
    is centered, because the penalty has an intended mean.
    """
    keep = tokens.mask
    present = keep[:, None] & (topk.ids >= 0)
    dtype = tokens.detached_logprob.dtype
    policy = torch.where(present, topk.logprob.to(dtype), 0.0)
    # 1 - mu(H) is a small difference of numbers near 1, so it is computed in float64.
    ln_pi = policy.detach().double()
    ln_mu = torch.where(present, topk.rollout_logprob.detach().double(), 0.0)
    ln_mu = torch.maximum(ln_mu, ln_pi - _FARTHEST)
    pi, mu = ln_pi.exp() * present, ln_mu.exp() * present

    sampled_in_topk = ((topk.ids == topk.target_ids[:, None]) & present).any(dim=1)
    sampled = torch.where(sampled_in_topk, 0.0, tokens.detached_logprob.double().exp())
    pi_tail = (torch.where(keep, topk.other_logprob.detach().double(), 0.0).exp() + sampled).clamp(min=_LEAST_TAIL)
    mu_tail = (1 - _over_list(mu)).clamp(min=_LEAST_TAIL)

    tail_tokens = 1 if topk.vocab_size is None else (topk.vocab_size - present.sum(dim=1)).clamp(min=1)
    columns = torch.cat([ln_pi, (pi_tail / tail_tokens).log()[:, None]], dim=1)
    anchors = torch.cat([ln_mu, (mu_tail / tail_tokens).log()[:, None]], dim=1)
    weights = _coefficients(s, tokens, columns, anchors, effective_size)
    alpha = mu_tail / pi_tail * weights[:, -1]
    coefficients = (product(weights[:, :-1], mu) - alpha[:, None] * pi).to(dtype)
    return Centering(
        score=_over_list(coefficients * policy),
        mass=_over_list(pi),
        anchor_mass=_over_list(mu),
        size=_over_list(coefficients.abs()),
    )


@torch.no_grad()
def _coefficients(
    s: ObjectiveSettings, tokens: Tokens, ln_pi: Tensor, ln_mu: Tensor, effective_size: Tensor | None
) -> Float[Tensor, "T n"]:
    """Return c = r w for each column, computed by the sampled token's code as if the column had been sampled."""
    n = ln_pi.shape[1]

    def repeated(value: Tensor) -> Tensor:
        return value[:, None].expand(-1, n).reshape(-1)

    candidates = Tokens(
        mask=repeated(tokens.mask),
        logprob=ln_pi.reshape(-1),
        detached_logprob=ln_pi.reshape(-1),
        rollout_logprob=ln_mu.reshape(-1),
        advantage=repeated(tokens.advantage.double()),
    )
    term = policy_term(s, candidates, None, effective_size)
    weight = term.weight
    if "quadratic" in s.control:
        truncated_away = (s.path == "ratio") & (term.used_ratio != term.ratio)
        weight = torch.where(truncated_away, torch.zeros_like(weight), torch.ones_like(weight))
    correction, _ = mismatch_weight(s, candidates)
    return product(term.used_ratio, product(weight, correction)).reshape(-1, n)


def _over_list(columns: Float[Tensor, "T K"]) -> Float[Tensor, " T"]:
    """Return the sum over the columns, added in order so that the zeros of absent columns change no bit."""
    if columns.shape[1] == 0:
        return columns.sum(dim=1)
    return columns.cumsum(dim=1)[:, -1]
