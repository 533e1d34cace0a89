"""Smooth weights in place of a region: one function per gate, each the formula of its paper, of control 'gate'.

r is the importance ratio as the loss uses it, A the advantage. A gate gives L and w, both [T] and without gradient, as
the controls do: the gradient is A r w grad ln pi(a).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .settings import ObjectiveSettings
from .trust_region import Position

_ADVANTAGE_FACTOR = (0.1, 10.0)  # MASPO: by how much an advantage may narrow and widen the gate
_RESPONSE_RATIO = (1e-8, math.exp(20))  # VESPO: where its kernel is evaluated
_LEAST_RATIO = 1e-30  # below it r w goes to 0 with r, for w = (r w) / r would overflow

Gate = Callable[[ObjectiveSettings, Position, Tensor], tuple[Tensor, Tensor]]


def sigmoid_gate(s: ObjectiveSettings, at: Position, r: Tensor) -> tuple[Tensor, Tensor]:
    """SAPO (arXiv 2511.20347):  L = A f(r),  f(r) = 4 / tau sigma(tau (r - 1)),  w = f'(r) = 4 sigma (1 - sigma).

    tau = gate_positive where A > 0, else gate_negative.
    """
    tau = _by_sign(at, s.gate_positive, s.gate_negative)
    sigma, rest = torch.sigmoid(tau * (r - 1)), torch.sigmoid(tau * (1 - r))  # 1 - sigma, without its cancellation
    return at.advantage * sigma * 4 / tau, 4 * sigma * rest


def gaussian_gate(s: ObjectiveSettings, at: Position, r: Tensor) -> tuple[Tensor, Tensor]:
    """MASPO (arXiv 2602.17550):  L = A w r,  w = exp(-(r - 1)^2 / (2 sigma^2)) where the token diverges, else 1.

    It diverges as in PPO: A > 0 and r > 1, or A < 0 and r < 1. sigma = clip(width / p^power, width, width_max), p(a) of
    the policy that r is taken to, times 1 + beta A where A > 0 and 1 / (1 - beta A) where A < 0, the factor within
    [0.1, 10].
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
    """ASPO (arXiv 2510.06062): where A > 0 the ratio is turned over, so that rare tokens count more, not less.

    A > 0:  L = A min(1 / r, c),  r w = min(1 / r, c), and 0 where r > 1 + epsilon_high.
    A < 0:  L = A min(r, c),      r w = min(r, c),     and 0 where r < 1 - epsilon_low.
    c = dual_clip keeps its gradient (soft dual clip); a ratio that PPO clips has none.
    """
    positive = at.advantage > 0
    clipped = torch.where(positive, r > 1 + s.epsilon_high, r < 1 - s.epsilon_low)
    bounded = torch.where(positive, r.clamp(max=1 + s.epsilon_high), r.clamp(min=1 - s.epsilon_low))
    used = torch.where(positive, 1 / bounded, bounded).clamp(max=s.dual_clip)
    return at.advantage * used, torch.where(clipped, torch.zeros_like(r), used / r.clamp(min=_LEAST_RATIO))


def gamma_gate(s: ObjectiveSettings, at: Position, r: Tensor) -> tuple[Tensor, Tensor]:
    """VESPO (arXiv 2602.10693):  r w = phi(r) = e^lambda r^k e^(-lambda r),  r the ratio of the whole response.

    lambda = gate_positive and k = gate_power_positive where A >= 0, else their negative counterparts.
    """
    decay = _by_sign(at, s.gate_positive, s.gate_negative, zero_is_positive=True)
    power = _by_sign(at, s.gate_power_positive, s.gate_power_negative, zero_is_positive=True)
    bounded = r.clamp(*_RESPONSE_RATIO)
    phi = torch.exp(decay + power * bounded.log() - decay * bounded)
    return at.advantage * phi, phi / r.clamp(min=_LEAST_RATIO)


GATES: Mapping[str, Gate] = {
    "sigmoid": sigmoid_gate,
    "gaussian": gaussian_gate,
    "inverse": inverse_gate,
    "gamma": gamma_gate,
}


def _by_sign(at: Position, positive: float, negative: float, zero_is_positive: bool = False) -> Tensor:
    above = at.advantage >= 0 if zero_is_positive else at.advantage > 0
    return torch.where(above, torch.full_like(at.advantage, positive), torch.full_like(at.advantage, negative))
