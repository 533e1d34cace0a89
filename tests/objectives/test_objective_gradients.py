"""Gradients of every method on random policies, against their formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.objectives import PRESETS
from tests.objectives.cases import gather, gradient, random_case, run

SEEDS = st.integers(0, 10_000)
TOPK_PENALTY = "experimental_topk_quadratic"
# Their other terms are not in `.weight`.
OTHER_TERMS = {
    TOPK_PENALTY, "score_centering", "score_centering_tis", "rollout_kl", "ess_adaptive", "distributional_ipo",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in OTHER_TERMS])
@settings(max_examples=4, deadline=None)
@given(seed=SEEDS, drift=st.floats(0.01, 4.0))
def test_weight_is_that_of_the_gradient(name, seed, drift):
    """d loss / d z = -A r w (e_a - pi) with r = pi(a)/mu(a)."""
    case = random_case(seed, drift=drift)
    out = run(name, case)
    pi = case.logits.detach().softmax(-1)
    toward = torch.nn.functional.one_hot(case.topk.target_ids, pi.shape[1]) - pi
    scale = case.call["advantage"] * (case.call["logprob"] - case.call["rollout_logprob"]).exp().detach()
    scale = torch.ones_like(scale) if name == "nll" else scale
    expected = -(scale * out.weight)[:, None] * toward
    torch.testing.assert_close(gradient(name, case), expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, k=st.integers(1, 12))
def test_topk_penalty_gradient_matches_the_written_objective(seed, k):
    """r A - |A|/(2 delta) [sum over S of (pi - mu)^2 + (pi_other - mu_other)^2], from the full vocabulary."""
    case = random_case(seed, k=k)
    ids, target = case.topk.ids, case.topk.target_ids
    generator = torch.Generator().manual_seed(seed)
    mu = (2 * torch.randn(8, 12, generator=generator, dtype=torch.float64)).softmax(-1)
    torch.testing.assert_close(mu.gather(1, ids).log(), case.topk.rollout_logprob)
    in_s = torch.zeros_like(mu, dtype=torch.bool).scatter(1, ids, True).scatter(1, target[:, None], True)
    pi = case.logits.softmax(-1)
    shift = pi - mu
    squares = (shift * in_s).square().sum(1) + (shift * ~in_s).sum(1).square()
    advantage = case.call["advantage"]
    ratio = gather(pi / mu, target)
    written = -(ratio * advantage - advantage.abs() / 0.4 * squares)
    torch.testing.assert_close(run(TOPK_PENALTY, case).loss.detach(), written.detach())
    expected = torch.autograd.grad(written.sum(), case.logits)[0]
    torch.testing.assert_close(gradient(TOPK_PENALTY, case), expected)
