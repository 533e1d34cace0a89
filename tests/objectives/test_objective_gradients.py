"""Gradients of every method on any policies, against what they are written to be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.objectives import PRESETS, sequence_weights
from tests.objectives.cases import gather, gradient, random_case, run

SEEDS = st.integers(0, 10_000)
TOPK_PENALTY = "experimental_topk_quadratic"
OTHER_TERMS = {TOPK_PENALTY, "score_centering", "score_centering_tis", "rollout_kl", "ess_adaptive"}  # not in `.weight`


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


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_quadratic_gradients_match_the_written_objective(seed):
    """SPO, DRPO and Mask-DRPO differentiated from their published formulas."""
    case = random_case(seed, drift=1.5)
    advantage, mu = case.call["advantage"], case.call["rollout_logprob"].exp()

    def written(penalty):
        ratio = (gather(case.logits.log_softmax(-1), case.topk.target_ids) - mu.log()).exp()
        return torch.autograd.grad(-(ratio * advantage - advantage.abs() * penalty(ratio)).sum(), case.logits)[0]

    def outside(ratio):
        away = ((advantage > 0) & (ratio > 1)) | ((advantage < 0) & (ratio < 1))
        return away & ((ratio - 1).abs() * mu > 0.15)

    torch.testing.assert_close(gradient("spo", case), written(lambda r: (r - 1) ** 2 / 0.4))
    torch.testing.assert_close(gradient("drpo", case), written(lambda r: mu * (r - 1) ** 2 / 25))
    torch.testing.assert_close(gradient("drpo_tr", case), written(lambda r: mu * (r - 1) ** 2 / 0.4))
    torch.testing.assert_close(gradient("mask_drpo", case), written(lambda r: outside(r) * mu * (r - 1) ** 2 / 25))


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


def test_gspo_gradient_matches_the_written_objective():
    """Mean over sequences of min(s A, clip(s) A), s the geometric mean ratio of the sequence."""
    case = random_case(3, tokens=12, drift=0.3)
    ids = torch.tensor([0] * 3 + [1] * 5 + [2] * 4)
    advantage = torch.tensor([1.0, -0.7, 0.4], dtype=torch.float64)
    case.call.update(sequence_ids=ids, advantage=advantage[ids])
    log_ratio = gather(case.logits.log_softmax(-1), case.topk.target_ids) - case.call["rollout_logprob"]
    s = torch.stack([log_ratio[ids == i].mean() for i in range(3)]).exp()
    for low, high in ((3e-4, 4e-4), (0.5, 0.5)):
        written = -torch.minimum(s * advantage, s.clamp(1 - low, 1 + high) * advantage).mean()
        expected = torch.autograd.grad(written, case.logits, retain_graph=True)[0]
        weights = sequence_weights("seq_mean_token_mean", torch.tensor([3, 5, 4]))[ids]
        out = run("gspo", case, epsilon_low=low, epsilon_high=high)
        assert (out.loss * weights).sum().item() == pytest.approx(written.item(), rel=1e-6)
        actual = torch.autograd.grad((out.loss * weights).sum(), case.logits, retain_graph=True)[0]
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


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
    ratio = (case.call["logprob"] - case.call["rollout_logprob"]).exp().detach()
    plain, dual = run("ppo", case), run("ppo_dual_clip", case)
    runaway = (case.call["advantage"] < 0) & (ratio > 3)
    assert runaway.any()
    assert torch.equal(dual.masked_tokens, plain.masked_tokens | runaway)
    advantage = case.call["advantage"]
    written = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    written = torch.where(advantage < 0, torch.maximum(written, 3.0 * advantage), written)
    torch.testing.assert_close(dual.loss.detach(), -written)
