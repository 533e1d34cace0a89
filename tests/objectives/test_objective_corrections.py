"""Mismatch weights, rejection, KL to a reference, entropy, overlong responses."""

import math

import pytest
import torch

from dppo_megatron.objectives import (
    ObjectiveError,
    build_objective,
    keep_finished,
    reduce_metrics,
    sequence_ids_from_cu_seqlens,
    soft_overlong_penalty,
)
from tests.objectives.cases import random_case

IDS = torch.tensor([0] * 4 + [1] * 5 + [2] * 3)


@pytest.fixture
def case():
    """Twelve tokens of three responses; the trainer's old policy is off mu by a known ratio."""
    made = random_case(21, tokens=12, drift=0.3)
    gap = torch.tensor([0.0, 0.1, 0.1, 0.0, 0.9, 0.0, 0.0, 0.0, 0.0, -0.8, 0.3, 0.5], dtype=torch.float64)
    made.call["old_logprob"] = made.call["rollout_logprob"] + gap
    made.call.update(sequence_ids=IDS, gap=gap)
    return made


def call(case, name="pg_is", **overrides):
    inputs = {key: value for key, value in case.call.items() if key != "gap"}
    return build_objective(name, **overrides)(**inputs)


def sums(gap):
    return torch.stack([gap[i == IDS].sum() for i in range(3)])[IDS]


def means(gap):
    return torch.stack([gap[i == IDS].mean() for i in range(3)])[IDS]


@pytest.mark.parametrize(("level", "log_ratio"), [("token", lambda gap: gap), ("sequence", sums), ("geometric", means)])
def test_truncated_and_masked_weights(case, level, log_ratio):
    ratio = log_ratio(case.call["gap"]).exp()
    mu_to_pi = (case.call["logprob"] - case.call["rollout_logprob"]).exp().detach()
    to_old = (case.call["logprob"] - case.call["old_logprob"]).exp().detach()

    # TIS: pi / old weighted by min(old / mu, C).
    tis = call(case, importance="old", mismatch="truncate", mismatch_level=level, mismatch_high=1.15)
    assert (ratio > 1.15).any()
    torch.testing.assert_close(tis.weight * mu_to_pi, to_old * ratio.clamp(max=1.15))

    # IcePop keeps the ratio inside the bounds and drops the token outside, whichever base r has.
    inside = (ratio >= 0.7) & (ratio <= 1.15)
    assert inside.any()
    assert not inside.all()
    bounds = {"mismatch": "mask", "mismatch_level": level, "mismatch_low": 0.7, "mismatch_high": 1.15}
    icepop = call(case, importance="old", **bounds)
    torch.testing.assert_close(icepop.weight * mu_to_pi, to_old * ratio * inside)
    rollout = call(case, **bounds)
    assert torch.equal(rollout.weight, inside.double())
    assert reduce_metrics(rollout.metrics)["correction/dropped_share"] == pytest.approx(1 - inside.double().mean())


def test_token_level_weights_do_not_correct_twice(case):
    """At token level, importance to the old policy times an untruncated TIS weight is pi / mu again."""
    tis = call(case, importance="old", mismatch="truncate", mismatch_high=1e6)
    torch.testing.assert_close(tis.weight, torch.ones(12, dtype=torch.float64))
    torch.testing.assert_close(tis.loss, call(case).loss)


@pytest.mark.parametrize(
    ("rejection", "low", "high", "kept"),
    [
        ("geometric", None, 1.1, {0, 2}),  # means 0.05, 0.18, 0
        ("sequence", 0.9, 1.1, {2}),  # sums 0.2, 0.9, 0
        ("any_token", 0.5, None, {0, 1}),  # a token at e^-0.8 = 0.449
        ("any_token", 0.5, 2.0, {0}),
    ],
)
def test_rejection_drops_whole_responses(case, rejection, low, high, kept):
    out = call(case, rejection=rejection, rejection_low=low, rejection_high=high)
    expected = torch.tensor([i in kept for i in IDS.tolist()])
    assert torch.equal(out.weight != 0, expected)
    assert (out.loss[~expected] == 0).all()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gspo", {}),
        ("pg_is", {"importance": "old", "mismatch": "truncate", "mismatch_level": "sequence", "mismatch_high": 1e9}),
    ],
)
def test_sequence_sums_are_the_same_bits_in_any_order(name, settings):
    """Ranks add in different orders: a threshold must not fall differently on them."""
    generator = torch.Generator().manual_seed(0)
    tokens, ids = 4000, torch.arange(4000) // 1000
    mu = -torch.rand(tokens, generator=generator)
    logprob = mu + 0.01 + 0.2 * torch.randn(tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) > 0.1
    objective = build_objective(name, **settings)

    def results(order):
        leaf = logprob[order].requires_grad_()
        out = objective(
            logprob=leaf, rollout_logprob=mu[order], old_logprob=leaf.detach(),
            advantage=-torch.ones(tokens), mask=mask[order], sequence_ids=ids[order],
        )  # fmt: skip
        back = order.argsort()
        return out.loss.detach()[back], torch.autograd.grad(out.loss.sum(), leaf)[0][back]

    loss, gradient = results(torch.arange(tokens))
    assert gradient[mask].any()
    for _ in range(5):
        permuted = results(torch.randperm(tokens, generator=generator))
        assert torch.equal(permuted[0], loss)
        assert torch.equal(permuted[1], gradient)


def test_a_log_prob_that_is_not_finite_affects_only_its_own_sequence(case):
    """An engine that gives a sampled token no probability."""
    case.call["rollout_logprob"][IDS == 1] = -torch.inf
    out = call(case, rejection="sequence", rejection_low=0.5, rejection_high=2.0)
    assert torch.equal(out.weight != 0, IDS != 1)
    assert torch.equal(out.loss.isfinite(), IDS >= 0)


def test_without_old_log_probs_the_mismatch_is_that_of_the_current_policy(case):
    del case.call["old_logprob"]
    ratio = (case.call["logprob"] - case.call["rollout_logprob"]).exp().detach()
    out = call(case, mismatch="mask", mismatch_low=0.8, mismatch_high=1.25)
    assert torch.equal(out.weight, ((ratio >= 0.8) & (ratio <= 1.25)).double())


def exact_kl(logits, ref):
    logprob = logits.log_softmax(0)
    return (logprob.exp() * (logprob - ref)).sum()


@pytest.fixture
def over_the_vocabulary():
    """One position, every token of the vocabulary as a sample weighted by mu: expectations are exact sums."""
    generator = torch.Generator().manual_seed(3)
    mu, pi, ref = (torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(3))
    logits = pi.clone().requires_grad_()
    logprob = logits.log_softmax(0)
    inputs = {
        "logprob": logprob,
        "rollout_logprob": mu,
        "reference_logprob": ref,
        "advantage": torch.zeros(9, dtype=torch.float64),
        "mask": torch.ones(9, dtype=torch.bool),
    }
    return logits, mu, ref, inputs


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_reference_kl_gradient_is_that_of_the_kl(over_the_vocabulary, estimator):
    logits, mu, ref, inputs = over_the_vocabulary
    objective = build_objective("pg_is", reference_kl=estimator, reference_kl_coefficient=0.5)
    loss = (mu.exp() * objective(**inputs).loss).sum()
    actual = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    expected = torch.autograd.grad(0.5 * exact_kl(logits, ref), logits)[0]
    torch.testing.assert_close(actual, expected)


def test_reference_kl_estimators_and_their_own_gradients(over_the_vocabulary):
    logits, _, ref, inputs = over_the_vocabulary
    inputs["rollout_logprob"] = inputs["logprob"].detach()
    pi = inputs["logprob"].detach().exp()
    gradients = {}
    for estimator in ("k1", "k2", "k3"):
        objective = build_objective(
            "pg_is", reference_kl=estimator, reference_kl_coefficient=1.0, reference_kl_gradient="estimator"
        )
        out = objective(**inputs)
        mean = (pi * out.loss).sum()
        gradients[estimator] = torch.autograd.grad(mean, logits, retain_graph=True)[0]
        if estimator != "k2":
            torch.testing.assert_close(mean, exact_kl(logits, ref))
        assert "train/reference_kl" in out.metrics
    expected = torch.autograd.grad(exact_kl(logits, ref), logits)[0]
    torch.testing.assert_close(gradients["k1"], torch.zeros(9, dtype=torch.float64))
    torch.testing.assert_close(gradients["k2"], expected)
    assert (gradients["k3"] - expected).abs().max() > 1e-2


def test_entropy_bonus_and_metric():
    case = random_case(4)
    logprobs = case.logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(1)
    plain = build_objective("pg_is")(**case.call, entropy=entropy)
    bonus = build_objective("pg_is", entropy_coefficient=0.1)(**case.call, entropy=entropy)
    torch.testing.assert_close(bonus.loss, plain.loss - 0.1 * entropy)
    difference = torch.autograd.grad((bonus.loss - plain.loss).sum(), case.logits, retain_graph=True)[0]
    torch.testing.assert_close(difference, torch.autograd.grad(-0.1 * entropy.sum(), case.logits, retain_graph=True)[0])
    assert reduce_metrics(plain.metrics)["train/entropy"] == pytest.approx(entropy.mean().item())
    assert torch.equal(plain.weight, bonus.weight)


def test_optional_terms_are_zero_outside_the_mask():
    case = random_case(4)
    keep = torch.tensor([True, False] * 4)
    dirty = torch.where(keep, torch.full((8,), -1.0, dtype=torch.float64), torch.nan)
    objective = build_objective("pg_is", reference_kl="k2", reference_kl_coefficient=1.0, entropy_coefficient=1.0)
    out = objective(**{**case.call, "mask": keep}, reference_logprob=dirty, entropy=dirty)
    assert (out.loss[~keep] == 0).all()
    assert torch.autograd.grad(out.loss.sum(), case.logits)[0].isfinite().all()


def test_overlong_helpers():
    lengths = torch.tensor([10, 80, 90, 100, 120])
    assert soft_overlong_penalty(lengths, max_length=100, buffer=20).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    for buffer in (0, 101):
        with pytest.raises(ValueError, match="buffer"):
            soft_overlong_penalty(lengths, 100, buffer)
    truncated = torch.tensor([False, False, True, False, True])
    assert keep_finished(truncated, lengths).tolist() == [10, 80, 0, 100, 0]


def test_sequence_ids_from_packed_boundaries():
    ids = sequence_ids_from_cu_seqlens(torch.tensor([0, 4, 9, 12], dtype=torch.int32), 12)
    assert torch.equal(ids, IDS)


def test_truncation_reports_the_share_of_capped_weights():
    case = random_case(4, tokens=30)
    old = case.call["rollout_logprob"] + torch.linspace(-1, 1, 30, dtype=torch.float64)
    call = {**case.call, "old_logprob": old}
    out = build_objective("pg_is", importance="old", mismatch="truncate", mismatch_high=1.5)(**call)
    ratio = torch.linspace(-1, 1, 30, dtype=torch.float64).exp()
    metrics = reduce_metrics(out.metrics)
    assert metrics["correction/capped_share"] == pytest.approx((ratio >= 1.5).double().mean().item())
    assert metrics["correction/weight_mean"] == pytest.approx(ratio.clamp(max=1.5).mean().item())
    assert metrics["correction/dropped_share"] == 0


def test_outlier_bounds_with_an_any_token_rejection_are_refused():
    with pytest.raises(ObjectiveError, match="set one of the two"):
        build_objective("pg_is", rejection="any_token", rejection_high=2.0, outlier_high=3.0)


@pytest.mark.parametrize("setting", ["reference_kl", "rollout_kl"])
@pytest.mark.parametrize("nats", [94.0, 700.0])
def test_k3_of_a_token_that_the_policy_has_left_is_bounded(setting, nats):
    """1 / r grows until e^10."""
    settings = {setting: "k3", f"{setting}_coefficient": 1.0}
    if setting == "reference_kl":
        settings["reference_kl_gradient"] = "estimator"
    policy = torch.tensor([-1.0 - nats], requires_grad=True)
    out = build_objective("dppo_binary_tv", **settings)(
        logprob=policy,
        rollout_logprob=policy.detach() if setting == "reference_kl" else torch.tensor([-1.0]),
        reference_logprob=torch.tensor([-1.0]),
        advantage=torch.zeros(1),
        mask=torch.ones(1, dtype=torch.bool),
    )
    out.loss.sum().backward()
    assert float(out.loss.detach()) == pytest.approx(math.exp(10) - 1 - nats, rel=1e-3)
    assert abs(float(policy.grad)) <= 1 + 1e-6
