"""The published loss of each method without a worked case, written once more from its paper or its authors' code.

Plain loops over responses in float64, differentiated by autograd; nothing here knows the axes. Where a source rewards
or clips what an engine cannot send (ratios beyond e^20, 16-bit log-probs), that is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.objectives.world import World

Loss = Callable[[World, Tensor], Tensor]  # of one response: the world, and the indices of its tokens


def clipped(r: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


def grpo(w: World, t: Tensor, high: float = 0.2) -> Tensor:
    return clipped(w.ratio[t], w.advantage[t], 0.2, high)


def ppo_dual_clip(w: World, t: Tensor, bound: float = 3.0) -> Tensor:
    a, once = w.advantage[t], grpo(w, t)
    return torch.where(a < 0, torch.minimum(once, -bound * a), once)


def straight_through(value: Tensor, gradient: Tensor, ln_pi: Tensor) -> Tensor:
    return value.detach() + gradient.detach() * (ln_pi - ln_pi.detach())


def gspo(w: World, t: Tensor, low: float = 3e-4, high: float = 4e-4) -> Tensor:
    """A token's share of min(s A, clip(s) A), s the geometric mean ratio of the response."""
    s = (w.ln_pi[t] - w.ln_mu[t]).mean().exp()
    return clipped(straight_through(s, s, w.ln_pi[t]), w.advantage[t], low, high)


def sapo(w: World, t: Tensor) -> Tensor:
    a, r = w.advantage[t], w.ratio[t]
    tau = 1.05 - 0.05 * (a > 0).double()
    return -a * torch.sigmoid(tau * (r - 1)) * 4 / tau


def maspo(w: World, t: Tensor, widest: float = 10.0, base: Tensor | None = None) -> Tensor:
    base = w.ln_mu if base is None else base
    a, r, p = w.advantage[t], (w.ln_pi[t] - base[t]).exp(), base[t].exp()
    width = (1.0 / p**0.3).clamp(1.0, widest)
    up = torch.exp(-((r.detach() - 1) ** 2) / 2 / (width * (1 + 0.03 * a).clamp(0.1, 10)) ** 2)
    down = torch.exp(-((r.detach() - 1) ** 2) / 2 / (width * (1 / (1 - 0.03 * a)).clamp(0.1, 10)) ** 2)
    r = torch.where((a < 0) & (r < 1), down * r, r)
    return -a * torch.where((a > 0) & (r > 1), up * r, r)


def aspo(w: World, t: Tensor) -> Tensor:
    a, r, ln_pi = w.advantage[t], w.ratio[t], w.ln_pi[t]
    loss = []
    for a_t, r_t, ln_t in zip(a, r, ln_pi, strict=True):
        if a_t < 0:
            used = r_t.clamp(min=0.8)
            soft = used > 3.0
            loss.append(straight_through(-a_t * 3.0, -a_t * 3.0, ln_t) if soft else -a_t * used)
        else:
            used = r_t.clamp(max=1.2)
            turned = used / used.detach() / used.detach()
            soft = 1 / used > 3.0
            loss.append(straight_through(-a_t * 3.0, -a_t * 3.0, ln_t) if soft else -a_t * turned)
    return torch.stack(loss)


def vespo(w: World, t: Tensor) -> Tensor:
    a, ln_pi = w.advantage[t], w.ln_pi[t]
    log_w = (ln_pi - w.ln_mu[t]).sum().detach().clamp(math.log(1e-8), 20)
    k, decay = 3 - (a >= 0).double(), 2 + (a >= 0).double()
    return -torch.exp(decay + k * log_w - decay * log_w.exp()) * a * ln_pi


def topr(w: World, t: Tensor) -> Tensor:
    a, ln_pi = w.advantage[t], w.ln_pi[t]
    whole = (ln_pi - w.ln_mu[t]).sum().exp().detach().clamp(0, 1)
    return -torch.where(a < 0, whole, torch.ones_like(whole)) * a * ln_pi


def dispo(w: World, t: Tensor) -> Tensor:
    a, r = w.advantage[t], w.ratio[t].detach()
    return -torch.where(a < 0, r.clamp(0.5, 2.0), r.clamp(0.0, 5.0)) * a * w.ln_pi[t]


def seq_tis(w: World, t: Tensor) -> Tensor:
    whole = (w.ln_pi[t] - w.ln_mu[t]).sum().exp().detach()
    return -whole.clamp(max=2.0) * w.advantage[t] * w.ln_pi[t]


def seq_mis(w: World, t: Tensor) -> Tensor:
    whole = (w.ln_pi[t] - w.ln_mu[t]).sum().exp().detach()
    return -(whole if whole <= 2 else 0.0) * w.advantage[t] * w.ln_pi[t]


def minpro(w: World, t: Tensor) -> Tensor:
    r = w.ratio[t]
    least = torch.stack([r[:i].min().detach() if i else torch.ones_like(r[0]) for i in range(len(t))])
    return clipped(least.detach() * r, w.advantage[t], 0.2, 0.28)


def harmful(w: World, t: Tensor) -> Tensor:
    return w.advantage[t] * (w.ln_pi[t] - w.ln_mu[t]).detach() > 0


def dropped(loss: Tensor, drop: Tensor) -> Tensor:
    return torch.where(drop, torch.zeros_like(loss), loss)


def cppo(
    w: World, t: Tensor, delta: float = 0.2, least: float = 0.8, spare: float = 0.02, ceiling: float = 2
) -> Tensor:
    d = (w.ln_pi[t].exp() - w.ln_mu[t].exp()).abs().detach()
    n = len(t)
    weight = [1 - (1 - least) * i / max(n - 1, 1) for i in range(n)]
    budget = min(max(torch.quantile(d, 0.9).item(), spare), ceiling * spare)
    drop, spent, allowed = [], 0.0, 0.0
    for i in range(n):
        drop.append(weight[i] * d[i].item() > min(delta, delta + budget * allowed - spent))
        spent, allowed = spent + weight[i] * d[i].item(), allowed + weight[i]
    return dropped(-w.advantage[t] * w.ratio[t], torch.tensor(drop) & harmful(w, t))


def ipo(w: World, t: Tensor) -> Tensor:
    return dropped(-w.advantage[t] * w.ratio[t], (w.ln_pi[t].exp() - w.ln_mu[t].exp()).abs().detach() > 0.15)


def ipo_cap(w: World, t: Tensor) -> Tensor:
    far = (w.ln_pi[t].exp() - w.ln_mu[t].exp()).abs().detach() > 0.3
    used = w.ratio[t].clamp(max=1e4)
    return dropped(straight_through(-w.advantage[t] * used, -w.advantage[t] * used, w.ln_pi[t]), far)


def bandpo_tv(w: World, t: Tensor, low: float = 0.0, high: float = 0.0) -> Tensor:
    p = w.ln_mu[t].exp()
    a, r = w.advantage[t], w.ratio[t]
    least, most = (1 - 0.05 / p).clamp(min=0, max=1 - low), (1 + 0.05 / p).clamp(min=1 + high)
    inside = torch.maximum(torch.minimum(r, most), least)
    loss = -torch.minimum(r * a, inside * a)
    return dropped(loss, inside.detach() * a < r.detach() * a)  # the value at the clip is a constant; here it is 0


def vaco(w: World, t: Tensor) -> Tensor:
    r = w.ratio[t]
    drop = ((r - 1).abs().mean() > 0.2) & harmful(w, t)
    return dropped(clipped(r, w.advantage[t], 0.2, 0.272), drop)


def _k3(w: World, t: Tensor) -> Tensor:
    return (w.ratio[t] - 1 - (w.ln_pi[t] - w.ln_mu[t])).detach()


def trm_max(w: World, t: Tensor) -> Tensor:
    return dropped(-w.advantage[t] * w.ratio[t], _k3(w, t).max() > 0.05)


def trm_mean(w: World, t: Tensor) -> Tensor:
    return dropped(-w.advantage[t] * w.ratio[t], _k3(w, t).mean() > 0.001)


def opsm(w: World, t: Tensor) -> Tensor:
    drop = ((w.ln_mu[t] - w.ln_pi[t]).mean() > 0.5) & (w.advantage[t] < 0)
    return dropped(clipped(w.ratio[t], w.advantage[t], 0.2, 0.2), drop)


def flash_reinforce(w: World, t: Tensor) -> Tensor:
    p, q = w.ln_mu[t].exp(), w.ln_pi[t].exp().detach()
    kl = p * (p.log() - q.log()) + (1 - p) * (torch.log1p(-p) - torch.log1p(-q))
    return dropped(-w.ratio[t].detach() * w.advantage[t] * w.ln_pi[t], kl.mean() > 3e-3)


def rollout_kl(w: World, t: Tensor) -> Tensor:
    beta = 0.1
    return -(w.ln_pi[t] * w.advantage[t] - 0.5 * beta * (w.ln_pi[t] - w.ln_mu[t]) ** 2)


def score_centering(w: World, t: Tensor, weigh: Callable[[Tensor], Tensor] = torch.ones_like) -> Tensor:
    loss = []
    for i in t.tolist():
        listed = w.ids[i] >= 0
        ln_p, ln_q = w.listed_ln_pi[i][listed], w.listed_ln_mu[i][listed]
        p, q = ln_p.detach().exp(), ln_q.exp()
        tail = w.other_ln_pi[i].exp()
        if not (w.ids[i] == w.sampled[i]).any():
            tail = tail + w.ln_pi[i].detach().exp()
        rho = (1 - q.sum()).clamp(min=1e-6) / tail.clamp(min=1e-6)
        coefficient = q * weigh(p / q) - rho * weigh(1 / rho) * p
        own = weigh(w.ratio[i].detach())
        loss.append(-w.advantage[i] * (own * w.ln_pi[i] - (coefficient * ln_p).sum()))
    return torch.stack(loss)


def score_centering_tis(w: World, t: Tensor) -> Tensor:
    return score_centering(w, t, lambda ratio: ratio.clamp(max=2.0))


def m2po(w: World, t: Tensor) -> Tensor:
    moved = w.ln_old - w.ln_mu
    away = w.advantage * moved > 0  # A > 0 and r > 1, or A < 0 and r < 1: what PPO would clip
    ranked = moved[w.mask & away].square().sort(descending=True).values
    keep_from = next(i for i in range(len(ranked)) if ranked[i:].mean() < 0.04)
    return dropped(-w.advantage[t] * w.ratio[t], away[t] & (moved[t].square() > ranked[keep_from]))


def ess_adaptive(w: World, t: Tensor) -> Tensor:
    r = (w.ln_old - w.ln_mu)[w.mask].exp()
    ess = r.sum() ** 2 / (r**2).sum() / len(r)
    log_ratio = w.ln_pi[t] - w.ln_mu[t]
    kl = log_ratio + (-log_ratio).clamp(-10, 10).exp() - 1
    return -w.ratio[t].detach().clamp(0, ess) * w.ln_pi[t] * w.advantage[t] + (1 - ess) * kl


def minirl(w: World, t: Tensor, cap: float = torch.inf) -> Tensor:
    a, moved = w.advantage[t], (w.ln_pi[t] - w.ln_old[t]).exp().detach()
    far = ((a > 0) & (moved > 1.27)) | ((a < 0) & (moved < 0.8))
    return dropped(-a * w.ratio[t].detach().clamp(max=cap) * w.ln_pi[t], far)


def minirl_tis(w: World, t: Tensor) -> Tensor:
    return minirl(w, t, 3.0)


def dppo_negative_only(w: World, t: Tensor, delta: float = 0.5) -> Tensor:
    fallen = (w.ln_mu[t].exp() - w.ln_pi[t].exp()).detach() > delta
    return dropped(-w.advantage[t] * w.ratio[t], fallen & (w.advantage[t] < 0))


def dppo_relaxed(w: World, t: Tensor) -> Tensor:
    far = (w.ln_mu[t].exp() - w.ln_pi[t].exp()).abs().detach() > 0.15
    return dropped(-w.advantage[t] * w.ratio[t], far & harmful(w, t) & (w.ln_mu[t].exp() >= 0.1))


def outcomes(w: World, i: int) -> tuple[Tensor, Tensor]:
    """mu and pi of the listed tokens, the sampled one and everything else, at token i."""
    kept = (w.ids[i] >= 0) & (w.ids[i] != w.sampled[i])
    mu = torch.cat([w.listed_ln_mu[i][kept].exp(), w.ln_mu[i].exp()[None]])
    pi = torch.cat([w.listed_ln_pi[i][kept].exp(), w.ln_pi[i].exp()[None], w.other_ln_pi[i].exp()[None]])
    return torch.cat([mu, 1 - mu.sum(0, keepdim=True)]), pi.detach()


def moving_outcomes(w: World, i: int) -> tuple[Tensor, Tensor]:
    """The same with the gradient of pi, at the mass of everything else too."""
    mu, pi = outcomes(w, i)
    listed = (w.ids[i] >= 0) & (w.ids[i] != w.sampled[i])
    inside = torch.cat([w.listed_ln_pi[i, listed], w.ln_pi[i : i + 1]]).exp()
    return mu, torch.cat([inside, pi[-1:] - (inside.sum() - inside.sum().detach())])


def dppo_predictive(w: World, t: Tensor, kl: bool = False) -> Tensor:
    """The gate is on the TV, or as published on the KL. The predicted change is that of the KL."""
    loss = []
    for i in t.tolist():
        mu, pi = outcomes(w, i)  # the sampled token is the last but one
        far = (mu * (mu / pi).log()).sum() > 0.05 if kl else (mu - pi).abs().sum() / 2 > 0.15
        change = (pi[-2] - mu[-2]) + (pi * (mu - pi)).sum()
        loss.append(dropped(-w.advantage[i] * w.ratio[i], far & (w.advantage[i] * change > 0)))
    return torch.stack(loss)


def dppo_predictive_kl(w: World, t: Tensor) -> Tensor:
    return dppo_predictive(w, t, kl=True)


def distributional_ipo(w: World, t: Tensor) -> Tensor:
    """Over the list and the sampled token; prime-rl takes the list alone, which contains it in a sampler's answers."""
    loss = []
    for i in t.tolist():
        mu, pi = moving_outcomes(w, i)
        far = (pi - mu).abs().sum() / 2 > 0.3
        least = torch.tensor([0.0] * (len(mu) - 1) + [1e-8], dtype=mu.dtype)  # its floor under the logs of the rest
        square = (mu * (torch.maximum(pi, least) / torch.maximum(mu, least)).log() ** 2).sum()
        loss.append(dropped(-w.advantage[i] * w.ratio[i], far) + 1e-3 * square)
    return torch.stack(loss)


def kpop(w: World, t: Tensor) -> Tensor:
    p, q = w.ln_pi[t].detach().exp(), w.ln_mu[t].exp()

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()

    return dropped(-w.advantage[t] * w.ratio[t], (kl(p, q) > 0.1) | (kl(q, p) > 0.1))


PUBLISHED: dict[str, tuple[dict[str, Any], Loss]] = {
    loss.__name__: ({}, loss)
    for loss in (
        grpo, ppo_dual_clip, ipo, dppo_predictive, gspo, sapo, maspo, aspo, vespo, topr, dispo, seq_tis, seq_mis,
        minpro, cppo, ipo_cap, bandpo_tv, vaco, trm_max, trm_mean, opsm, flash_reinforce, rollout_kl, score_centering,
        score_centering_tis, m2po, ess_adaptive, dppo_negative_only, dppo_relaxed, dppo_predictive_kl,
        distributional_ipo, kpop, minirl, minirl_tis,
    )
}  # fmt: skip
