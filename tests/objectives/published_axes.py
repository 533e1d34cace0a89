"""Axes that no preset sets, each written once more as published.py does it, and the check of both."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dppo_megatron.objectives import build_objective
from tests.objectives import published
from tests.objectives.world import World, world


def delta_low(w: World, t: Tensor) -> Tensor:
    shift = (w.ln_pi[t].exp() - w.ln_mu[t].exp()).detach()
    far = torch.where(shift > 0, shift > 0.15, -shift > 0.03)
    return published.dropped(-w.advantage[t] * w.ratio[t], far & published.harmful(w, t))


def relaxed(side: str, clip: float | None) -> published.Loss:
    """Rare tokens without a region where they became rarer, or more frequent."""

    def loss(w: World, t: Tensor) -> Tensor:
        p, a, r = w.ln_mu[t].exp(), w.advantage[t], w.ratio[t]
        freed = (p < 0.3) & ((r < 1) if side == "low" else (r > 1))
        far = ((w.ln_pi[t].exp() - p).abs() > 0.1) & published.harmful(w, t) if clip is None else None
        held = published.clipped(r, a, clip, clip) if far is None else published.dropped(-a * r, far)
        return torch.where(freed, -a * r, held)

    return loss


def m2po_clip(w: World, t: Tensor, budget: float = 0.08) -> Tensor:
    """The released rule: PPO's clip at the largest t for which the squares, capped at t^2, average below the budget."""
    moved = w.ln_old - w.ln_mu
    away = w.advantage * moved > 0
    squares = moved[w.mask & away].square()
    fit = [bound for bound in [torch.zeros(()), *squares] if squares.clamp(max=bound).mean() < budget]
    bound = max(fit).sqrt()
    low, high = min(float((-bound).exp()), 0.7), max(float(bound.exp()), 1.5)
    r = moved[t].exp()
    return published.dropped(-w.advantage[t] * w.ratio[t], away[t] & ((r < low) | (r > high)))


def penalised(kind: str, delta: float, weighted: bool, only_outside: bool = False) -> published.Loss:
    """r A minus |A| / delta D, or minus D / delta: the ablation of the DRPO paper at the scale of its own penalty."""

    def loss(w: World, t: Tensor) -> Tensor:
        mu, pi, r = w.ln_mu[t].exp(), w.ln_pi[t].exp(), w.ratio[t]
        distance = {
            "l2": mu * (r - 1) ** 2 / 2,
            "tv": (pi - mu).abs(),
            "kl": mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log(),
            "k3": r - 1 - r.log(),
        }[kind]
        scale = (w.advantage[t].abs() if weighted else torch.ones_like(mu)) / delta
        if only_outside:
            scale = scale * (((pi - mu).abs() > 0.15) & published.harmful(w, t))
        return -w.advantage[t] * r + scale * distance

    return loss


def two_rejections(w: World, t: Tensor) -> Tensor:
    ratio = w.ratio[t].detach()
    drop = (ratio.log().mean().exp() > 1.1) | (ratio < 0.3).any() | (ratio > 3).any()
    return published.dropped(-w.advantage[t] * ratio.detach() * w.ln_pi[t], drop)


def total_variation(mu: Tensor, pi: Tensor) -> Tensor:
    return (mu - pi).abs().sum() / 2


def kl(mu: Tensor, pi: Tensor) -> Tensor:
    return (mu * (mu / pi).log()).sum()


def dppo(distance: Callable[[Tensor, Tensor], Tensor], delta: float, *, topk: bool) -> published.Loss:
    """No gradient where D > delta and the update moves the sampled token further away."""

    def loss(w: World, t: Tensor) -> Tensor:
        found = []
        for i in t.tolist():
            mu, pi = (
                published.outcomes(w, i)
                if topk
                else (torch.stack([p, 1 - p]) for p in (w.ln_mu[i].exp(), w.ln_pi[i].exp()))
            )
            found.append(distance(mu, pi).detach())
        return published.dropped(-w.advantage[t] * w.ratio[t], (torch.stack(found) > delta) & published.harmful(w, t))

    return loss


def topk_quadratic(w: World, t: Tensor) -> Tensor:
    """r A minus |A| / (2 delta) times the squared shifts of the listed tokens, the sampled one and all others."""
    squares = []
    for i in t.tolist():
        mu, pi = published.moving_outcomes(w, i)
        squares.append(((pi - mu) ** 2).sum())
    return -w.advantage[t] * w.ratio[t] + w.advantage[t].abs() / 0.4 * torch.stack(squares)


def response_topk(w: World, t: Tensor) -> Tensor:
    distances = [total_variation(*published.outcomes(w, i)) for i in t.tolist()]
    return published.dropped(-w.advantage[t] * w.ratio[t], torch.stack(distances).max() > 0.3)


def response_k2(w: World, t: Tensor) -> Tensor:
    k2 = (w.ln_pi[t] - w.ln_mu[t]).detach() ** 2 / 2
    return published.dropped(-w.advantage[t] * w.ratio[t], k2.mean() > 0.05)


def spo(w: World, t: Tensor) -> Tensor:
    a, r = w.advantage[t], w.ratio[t]
    return -a * r + a.abs() * (r - 1) ** 2 / (0.2 + 0.6 * (r > 1).double())


_PENALTY = {"delta": 0.5}
# Axes that no preset sets, and presets of our own: label -> (preset, overrides, written loss).
ALONE: dict[str, tuple[str, dict[str, Any], published.Loss]] = {
    "binary_tv": ("dppo_binary_tv", {"delta": 0.05}, dppo(total_variation, 0.05, topk=False)),
    "binary_kl": ("dppo_binary_kl", {"delta": 0.02}, dppo(kl, 0.02, topk=False)),
    "topk_tv": ("dppo_topk_tv", {"delta": 0.05}, dppo(total_variation, 0.05, topk=True)),
    "topk_kl": ("dppo_topk_kl", {"delta": 0.02}, dppo(kl, 0.02, topk=True)),
    "capped": (
        "pg_is",
        {"ratio_cap": 2.0, "gradient_path": "ratio"},
        lambda w, t: -w.advantage[t] * w.ratio[t].clamp(max=2.0),
    ),
    "spo_sides": ("spo", {"epsilon_low": 0.1, "epsilon_high": 0.4}, spo),
    "dual_clip": ("ppo_dual_clip", {"dual_clip": 1.5}, lambda w, t: published.ppo_dual_clip(w, t, 1.5)),
    "dapo": ("dapo", {}, lambda w, t: published.grpo(w, t, 0.28)),
    "nll": ("nll", {}, lambda w, t: -w.ln_pi[t]),
    "experimental_topk_quadratic": ("experimental_topk_quadratic", {}, topk_quadratic),
    "gspo_wide": ("gspo", {"epsilon_low": 0.5, "epsilon_high": 0.5}, lambda w, t: published.gspo(w, t, 0.5, 0.5)),
    "cppo_tight": (
        "cppo",
        {"delta": 0.06, "position_weight": 0.2, "prefix_budget": 0.06},
        lambda w, t: published.cppo(w, t, 0.06, 0.2, 0.06),
    ),
    "cppo_middle": (
        "cppo",
        {"delta": 0.03, "position_weight": 0.5, "prefix_budget": 0.06},
        lambda w, t: published.cppo(w, t, 0.03, 0.5, 0.06),
    ),
    "cppo_ceiling": (
        "cppo",
        {"delta": 0.06, "position_weight": 0.2, "prefix_budget": 0.01, "prefix_budget_ceiling": 5},
        lambda w, t: published.cppo(w, t, 0.06, 0.2, 0.01, 5),
    ),
    "bandpo_relaxed": (
        "bandpo_tv",
        {"free_low": 0.2, "free_high": 0.28},
        lambda w, t: published.bandpo_tv(w, t, 0.2, 0.28),
    ),
    "maspo_narrow": ("maspo", {"gate_width_max": 1.3}, lambda w, t: published.maspo(w, t, 1.3)),
    "maspo_old": ("maspo", {"importance": "old"}, lambda w, t: published.maspo(w, t, base=w.ln_old)),
    "negative_tight": ("dppo_negative_only", {"delta": 0.05}, lambda w, t: published.dppo_negative_only(w, t, 0.05)),
    "delta_low": ("dppo_binary_tv", {"delta_low": 0.03}, delta_low),
    "exempt_low": ("dppo_binary_tv", {"delta": 0.1, "exempt_below": 0.3, "exempt_side": "low"}, relaxed("low", None)),
    "exempt_high": ("ppo", {"exempt_below": 0.3, "exempt_side": "high"}, relaxed("high", 0.2)),
    "penalty_l2": ("drpo_tr", {**_PENALTY, "penalty_weight": "one"}, penalised("l2", 0.5, False)),
    "penalty_tv": ("drpo_tr", {**_PENALTY, "penalty": "tv"}, penalised("tv", 0.5, True)),
    "penalty_kl": ("drpo_tr", {**_PENALTY, "penalty": "kl"}, penalised("kl", 0.5, True)),
    "penalty_k3": ("drpo_tr", {**_PENALTY, "penalty": "k3", "penalty_weight": "one"}, penalised("k3", 0.5, False)),
    "mask_drpo": ("mask_drpo", {}, penalised("l2", 12.5, True, only_outside=True)),
    "drpo_tr": ("drpo_tr", {}, penalised("l2", 0.2, True)),
    "penalty_outside": (
        "mask_drpo",
        {"penalty": "tv", "penalty_delta": 0.5},
        penalised("tv", 0.5, True, only_outside=True),
    ),
    "m2po_clip": ("m2po", {"batch_statistic": "second_moment_clip", "second_moment_budget": 0.08}, m2po_clip),
    "rejections": (
        "pg_is",
        {
            "gradient_path": "logprob",
            "rejection": "geometric",
            "rejection_high": 1.1,
            "outlier_low": 0.3,
            "outlier_high": 3.0,
        },
        two_rejections,
    ),
    "response_topk": (
        "pg_is",
        {"response_region": "max", "response_divergence": "topk_tv", "response_delta": 0.3},
        response_topk,
    ),
    "response_k2": (
        "pg_is",
        {"response_region": "mean", "response_divergence": "k2", "response_delta": 0.05},
        response_k2,
    ),
}
EVERY = {name: (name, overrides, loss) for name, (overrides, loss) in published.PUBLISHED.items()} | ALONE


def check(label: str, seed: int, dtype: torch.dtype = torch.float64) -> None:
    """Loss and gradient on one world equal the written ones: to 1e-10, in fp32 to 1e-6 of their size."""
    name, overrides, loss = EVERY[label]
    ours = world(seed, dtype)
    objective = build_objective(name, **overrides)
    call = ours.call
    if not objective.needs_old:  # a trainer computes it for none but those that ask
        del call["old_logprob"]
    out = objective(**call)
    theirs = ours.double()
    written = torch.zeros_like(theirs.ln_pi.detach())
    for tokens in theirs.responses:
        written = written.index_copy(0, tokens, loss(theirs, tokens))
    leaves = ("ln_pi", "listed_ln_pi")
    pairs = [(out.loss.detach(), written.detach())]
    for leaf in leaves:
        gradients = [
            torch.autograd.grad(total.sum(), getattr(w, leaf), retain_graph=True, allow_unused=True)[0]
            for total, w in ((out.loss, ours), (written, theirs))
        ]
        zeros = torch.zeros_like(getattr(theirs, leaf))
        pairs.append(tuple(zeros if g is None else g for g in gradients))
    bound = 1e-10 if dtype == torch.float64 else 1e-6
    for actual, expected in pairs:
        expected = expected.nan_to_num(nan=0.0)
        worst = ((actual.double() - expected).abs() / expected.abs().clamp(min=1)).max().item()
        assert worst <= bound, f"{label}, seed {seed}, {dtype}: off by {worst:.2e}"
