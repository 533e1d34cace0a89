"""Implement the trust-region controls: one function per control, with the formula from the paper.

mu = rollout policy, pi = policy in training, a = sampled token, A = advantage, r = pi(a) / mu(a), D = divergence. The
papers maximize L; the loss here is -L. Every method's gradient is d L / d ln pi(a) = A r w. A control returns -L and w,
both [T] and without gradient. `Objective` combines them so that the gradient of L is exactly A r w.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .divergence import binary_kl
from .inputs import Buckets
from .settings import ObjectiveSettings
from .trust_region import Position

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


_ADVANTAGE_FACTOR = (0.1, 10.0)  # MASPO: factors by which an advantage may narrow and widen the gate
_RESPONSE_RATIO = (1e-8, math.exp(20))  # VESPO: range in which the kernel is evaluated
_LEAST_RATIO = 1e-30  # dividing by a smaller r would make w = (r w) / r overflow; below it, r w falls to 0 with r


@dataclass(frozen=True)
class Controlled:
    """Contains a control's result, all [T].

    loss: -L.
    weight: w.
    outside: tokens that the control masks, clips or penalizes.
    penalty: a further loss term with a gradient, or None.
    slope: d penalty / d ln pi(a), added to the gradient that the penalty tensor carries. None = nothing to add.
    """

    loss: Float[Tensor, " T"]
    weight: Float[Tensor, " T"]
    outside: Bool[Tensor, " T"]
    penalty: Float[Tensor, " T"] | None = None
    slope: Float[Tensor, " T"] | None = None


# The arguments are the settings, the tokens' positions, r as used in the loss (after floor and cap), and the top K.
Control = Callable[[ObjectiveSettings, Position, Tensor, Buckets | None], Controlled]


def dppo_mask(s: ObjectiveSettings, at: Position, r: Tensor, _: Buckets | None) -> Controlled:
    """Apply DPPO (arXiv 2602.04879):  L = M r A,  w = M, where

        M = 0  iff  D > delta  and  (A > 0 and r > 1,  or  A < 0 and r < 1),  else 1.

    `at.exceeds` is D > delta, `at.diverging` the condition in brackets; axes may replace both conditions.
    """
    outside = at.exceeds & at.diverging
    return Controlled(-at.advantage * torch.where(outside, 0.0, r), (~outside).to(r.dtype), outside)


def ppo_clip(s: ObjectiveSettings, at: Position, r: Tensor, _: Buckets | None) -> Controlled:
    """Apply PPO's clip (arXiv 1707.06347 eq. 7):  L = min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A).

    w = 0 where the clipped ratio is used, else 1. Dual clip (arXiv 1912.09729 eq. 4): where A < 0, L = max(this L,
    dual_clip A).
    """
    lower, upper = 1 - s.epsilon_low, 1 + s.epsilon_high
    outside = ((at.ratio < lower) | (at.ratio > upper)) & at.diverging
    clipped = at.ratio.clamp(lower, upper)
    if s.dual_clip is not None:
        runaway = (at.advantage < 0) & (at.ratio > s.dual_clip)
        outside, clipped = outside | runaway, torch.where(runaway, s.dual_clip, clipped)
    return Controlled(-at.advantage * torch.where(outside, clipped, r), (~outside).to(r.dtype), outside)


def spo(s: ObjectiveSettings, at: Position, r: Tensor, _: Buckets | None) -> Controlled:
    """Apply SPO (arXiv 2401.16025):  L = r A - |A| / (2 epsilon) (r - 1)^2,  w = 1 - sign(A) (r - 1) / epsilon."""
    return _quadratic(at, r, _ratio_shift(s, at))


def drpo(s: ObjectiveSettings, at: Position, r: Tensor, _: Buckets | None) -> Controlled:
    """Apply DRPO (arXiv 2606.09821):  L = r A - |A| / (2 delta) mu (r - 1)^2,  w = 1 - sign(A) (pi - mu) / delta."""
    if s.penalty != "l2" or s.penalty_weight != "advantage":
        return _penalised(s, at, r, s.delta)
    return _quadratic(at, r, at.shift / s.delta)


def mask_spo(s: ObjectiveSettings, at: Position, r: Tensor, buckets: Buckets | None) -> Controlled:
    """Apply SPO's penalty only where PPO clips."""
    return _quadratic(at, r, _ratio_shift(s, at), only=ppo_clip(s, at, r, buckets).outside)


def mask_drpo(s: ObjectiveSettings, at: Position, r: Tensor, buckets: Buckets | None) -> Controlled:
    """Apply Mask-DRPO (arXiv 2606.09821): DRPO's penalty, but only where DPPO masks."""
    outside, delta = dppo_mask(s, at, r, buckets).outside, s.penalty_delta or s.delta
    if s.penalty != "l2" or s.penalty_weight != "advantage":
        return _penalised(s, at, r, delta, only=outside)
    return _quadratic(at, r, at.shift / delta, only=outside)


def topk_quadratic(s: ObjectiveSettings, at: Position, r: Tensor, buckets: Buckets) -> Controlled:
    """Penalize the whole top K:  L = r A - |A| / (2 delta) sum over S and the rest of (pi - mu)^2.

    This is our experiment, not from a paper. DRPO's penalty |A| / (2 delta) mu(a) (r - 1)^2 is one sample, a from
    mu, of |A| / (2 delta) sum (pi - mu)^2. Here the sum runs over S, the top K and a. All other mass counts as one
    token. This token's gradient is minus the gradient of the top-K masses, so the kernel needs no gradient for `other`.
    w = 1, because the penalty sends a gradient through the top K.
    """
    scale = at.advantage.abs() / (2 * (s.penalty_delta or s.delta))
    policy = buckets.policy
    inside = policy.sum(dim=1)
    other = buckets.policy_other_logprob.exp() - (inside - inside.detach())
    squares = (policy - buckets.anchor).square().sum(dim=1) + (other - buckets.anchor_other).square()
    plain = no_control(s, at, r, buckets)
    return Controlled(plain.loss, plain.weight, plain.outside, scale * squares)


def mask_topk_quadratic(s: ObjectiveSettings, at: Position, r: Tensor, buckets: Buckets) -> Controlled:
    """Apply the penalty of `topk_quadratic` only where DPPO masks."""
    everywhere = topk_quadratic(s, at, r, buckets)
    outside = dppo_mask(s, at, r, buckets).outside
    return Controlled(everywhere.loss, everywhere.weight, outside, torch.where(outside, everywhere.penalty, 0.0))


def no_control(s: ObjectiveSettings, at: Position, r: Tensor, _: Buckets | None) -> Controlled:
    """Apply the plain policy gradient with importance sampling:  L = r A,  w = 1."""
    return Controlled(-at.advantage * r, torch.ones_like(r), torch.zeros_like(at.diverging))


def gate(s: ObjectiveSettings, at: Position, r: Tensor, _: Buckets | None) -> Controlled:
    """Apply a smooth weight instead of a trust region, with one of the gates below. Each gate returns (L, w)."""
    value, weight = GATES[s.gate](s, at, r)
    return Controlled(-value, weight, torch.zeros_like(at.diverging))


def sigmoid_gate(s: ObjectiveSettings, at: Position, r: Tensor) -> tuple[Tensor, Tensor]:
    """Apply SAPO (arXiv 2511.20347):  L = A f(r),  f(r) = 4 / tau sigma(tau (r - 1)),  w = f'(r) = 4 sigma (1 - sigma).

    tau = gate_positive where A > 0, else gate_negative.
    """
    tau = _by_sign(at, s.gate_positive, s.gate_negative)
    sigma, rest = torch.sigmoid(tau * (r - 1)), torch.sigmoid(tau * (1 - r))  # 1 - sigma, without cancellation
    return at.advantage * sigma * 4 / tau, 4 * sigma * rest


def gaussian_gate(s: ObjectiveSettings, at: Position, r: Tensor) -> tuple[Tensor, Tensor]:
    """Apply MASPO (arXiv 2602.17550):  L = A w r,  w = exp(-(r - 1)^2 / (2 sigma^2)) if the token diverges, else 1.

    A token diverges as in PPO: A > 0 and r > 1, or A < 0 and r < 1. sigma = clip(width / p^power, width, width_max),
    times a factor within [0.1, 10]: 1 + beta A where A > 0 and 1 / (1 - beta A) where A < 0. The policy in r's
    denominator gives p = p(a).
    """
    width = (s.gate_width * torch.exp(-s.gate_mass_power * at.base)).clamp(s.gate_width, s.gate_width_max)
    risk = torch.where(
        at.advantage > 0, 1 + s.gate_positive * at.advantage, 1 / (1 - s.gate_negative * at.advantage.clamp(max=0))
    )
    sigma = width * risk.clamp(*_ADVANTAGE_FACTOR)
    diverging = at.advantage * (r - 1) > 0
    w = torch.where(diverging, torch.exp(-((r - 1) ** 2) / (2 * sigma**2)), torch.ones_like(r))
    return at.advantage * torch.where(w == 0, torch.zeros_like(r), w * r), w


def inverse_gate(s: ObjectiveSettings, at: Position, r: Tensor) -> tuple[Tensor, Tensor]:
    """Apply ASPO (arXiv 2510.06062): where A > 0 the ratio is inverted, so that rare tokens count more, not less.

    A > 0:  L = A min(1 / r, c),  r w = min(1 / r, c), and 0 where r > 1 + epsilon_high.
    A < 0:  L = A min(r, c),      r w = min(r, c),     and 0 where r < 1 - epsilon_low.
    c = dual_clip keeps its gradient (soft dual clip); a ratio that PPO clips has no gradient.
    """
    positive = at.advantage > 0
    clipped = torch.where(positive, r > 1 + s.epsilon_high, r < 1 - s.epsilon_low)
    bounded = torch.where(positive, r.clamp(max=1 + s.epsilon_high), r.clamp(min=1 - s.epsilon_low))
    factor = torch.where(positive, 1 / bounded, bounded).clamp(max=s.dual_clip)
    return at.advantage * factor, torch.where(clipped, torch.zeros_like(r), factor / r.clamp(min=_LEAST_RATIO))


def gamma_gate(s: ObjectiveSettings, at: Position, r: Tensor) -> tuple[Tensor, Tensor]:
    """Apply VESPO (arXiv 2602.10693):  r w = phi(r) = e^lambda r^k e^(-lambda r),  r is the whole response's ratio.

    lambda = gate_positive and k = gate_power_positive where A >= 0, else their negative counterparts.
    """
    decay = _by_sign(at, s.gate_positive, s.gate_negative, zero_is_positive=True)
    power = _by_sign(at, s.gate_power_positive, s.gate_power_negative, zero_is_positive=True)
    bounded = r.clamp(*_RESPONSE_RATIO)
    phi = torch.exp(decay + power * bounded.log() - decay * bounded)
    return at.advantage * phi, phi / r.clamp(min=_LEAST_RATIO)


GATES: Mapping[str, Callable[[ObjectiveSettings, Position, Tensor], tuple[Tensor, Tensor]]] = {
    "sigmoid": sigmoid_gate,
    "gaussian": gaussian_gate,
    "inverse": inverse_gate,
    "gamma": gamma_gate,
}


_TV_AND_KL = ("binary_tv", "binary_kl", "kl_either", "topk_tv", "topk_kl")
CONTROLS: Mapping[tuple[str, str], Control] = {  # keys: values of the axes control and divergence
    **{("none", divergence): no_control for divergence in (*_TV_AND_KL, "ratio")},
    **{("gate", divergence): gate for divergence in (*_TV_AND_KL, "ratio")},
    **{("mask", divergence): dppo_mask for divergence in _TV_AND_KL},
    ("mask", "ratio"): ppo_clip,
    ("quadratic", "ratio"): spo,
    ("quadratic", "binary_tv"): drpo,
    ("quadratic", "topk_tv"): topk_quadratic,
    ("mask_quadratic", "ratio"): mask_spo,
    ("mask_quadratic", "binary_tv"): mask_drpo,
    ("mask_quadratic", "topk_tv"): mask_topk_quadratic,
}


def _quadratic(at: Position, r: Tensor, shift: Tensor, only: Tensor | None = None) -> Controlled:
    """Apply a quadratic penalty:  L = r A - |A| / 2 shift (r - 1),  w = 1 - sign(A) shift;  r A and 1 if `only` is
    False.

    shift [T]: distance from the anchor divided by the threshold, (r - 1) / epsilon or (pi - mu) / delta.
    """
    penalty = 0.5 * at.advantage.abs() * shift * (r - 1)
    weight = 1 - at.advantage.sign() * shift
    if only is None:
        return Controlled(-at.advantage * r + penalty, weight, torch.zeros_like(at.diverging))
    return Controlled(-at.advantage * r + torch.where(only, penalty, 0.0), torch.where(only, weight, 1.0), only)


def _penalised(s: ObjectiveSettings, at: Position, r: Tensor, delta: float, only: Tensor | None = None) -> Controlled:
    """Apply the plain policy gradient and penalize the sampled token by |A| D / delta or, without |A|, D / delta.

    D is mu (r - 1)^2 / 2 (l2), |pi - mu| (tv), the binary KL(mu || pi) (kl) or r - 1 - ln r (k3). The DRPO paper's
    ablation names these penalties without a scale. Here they have the scale of DRPO's penalty.
    """
    mu, pi = at.anchor.exp(), at.policy.exp()
    mu_rest, pi_rest = (-torch.expm1(p.clamp(max=-torch.finfo(p.dtype).eps)) for p in (at.anchor, at.policy))
    value, slope = {
        "l2": lambda: (0.5 * mu * (at.ratio - 1) ** 2, pi * (at.ratio - 1)),
        "tv": lambda: (at.shift.abs(), pi * at.shift.sign()),
        "kl": lambda: (binary_kl(at.anchor, at.policy), mu_rest / pi_rest - 1),  # (pi - mu) / (1 - pi)
        "k3": lambda: (at.ratio - 1 - at.ratio.log(), at.ratio - 1),
    }[s.penalty]()
    scale = (at.advantage.abs() if s.penalty_weight == "advantage" else torch.ones_like(r)) / delta
    if only is not None:
        scale = torch.where(only, scale, torch.zeros_like(scale))
    outside = torch.zeros_like(at.diverging) if only is None else only
    return Controlled(-at.advantage * r, torch.ones_like(r), outside, scale * value, scale * slope)


def _ratio_shift(s: ObjectiveSettings, at: Position) -> Tensor:
    shift = at.ratio - 1
    return torch.where(shift > 0, shift / s.epsilon_high, shift / s.epsilon_low)


def _by_sign(at: Position, positive: float, negative: float, zero_is_positive: bool = False) -> Tensor:
    is_positive = at.advantage >= 0 if zero_is_positive else at.advantage > 0
    return torch.where(is_positive, torch.full_like(at.advantage, positive), torch.full_like(at.advantage, negative))
