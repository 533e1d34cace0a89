"""Gradients of every method on random policies, against their formulas."""

import math

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


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=3, deadline=None)
@given(seed=SEEDS)
def test_on_policy_every_method_is_the_policy_gradient(name, seed):
    case = random_case(seed, on_policy=True)
    out = run(name, case)
    torch.testing.assert_close(out.weight, torch.ones_like(out.weight), rtol=0, atol=1e-9)
    advantage = torch.ones_like(case.call["advantage"]) if name == "nll" else case.call["advantage"]
    pi = case.logits.detach().softmax(-1)
    toward = torch.nn.functional.one_hot(case.topk.target_ids, pi.shape[1]) - pi
    torch.testing.assert_close(gradient(name, case), -advantage[:, None] * toward, rtol=0, atol=1e-9)


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


def test_quadratic_on_the_ratio_scales_each_side_by_its_own_epsilon():
    case = random_case(13, tokens=30)
    ratio = (case.call["logprob"] - case.call["rollout_logprob"]).exp().detach()
    scale = torch.where(ratio > 1, 0.4, 0.1)
    out = run("spo", case, epsilon_low=0.1, epsilon_high=0.4)
    torch.testing.assert_close(out.weight, 1 - case.call["advantage"].sign() * (ratio - 1) / scale, rtol=1e-6, atol=0)


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


def test_ratio_cap_by_gradient_path():
    """sg(min(r, C)) ln pi keeps C / r of the gradient above the cap; min(r, C) itself keeps none."""
    case = random_case(4, tokens=60, drift=2.0)
    ratio = (case.call["logprob"] - case.call["rollout_logprob"]).exp().detach()
    above = ratio > 2.0
    assert above.any()
    kept = run("pg_is", case, ratio_cap=2.0).weight
    torch.testing.assert_close(kept, ratio.clamp(max=2.0) / ratio)
    lost = run("pg_is", case, ratio_cap=2.0, gradient_path="ratio")
    assert torch.equal(lost.weight, (~above).double())
    torch.testing.assert_close(lost.loss.detach(), -case.call["advantage"] * ratio.clamp(max=2.0))
    assert torch.equal(gradient("pg_is", case), gradient("pg_is", case, gradient_path="logprob")), (
        "uncapped, both paths have one gradient"
    )


def test_dual_clip_is_the_one_mask_on_a_converging_side():
    case = random_case(12, tokens=80, drift=3.0)
    runaway = (case.call["advantage"] < 0) & (case.call["logprob"] - case.call["rollout_logprob"] > math.log(3))
    assert runaway.any()
    assert torch.equal(run("ppo_dual_clip", case).masked_tokens, run("ppo", case).masked_tokens | runaway)
