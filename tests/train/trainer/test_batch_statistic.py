"""The number of a whole batch does not depend on how the batch was split, and reaches every micro-batch."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dppo_megatron.objectives import TopKLogprobs, build_objective
from dppo_megatron.train.trainer.policy_logprobs import with_batch_statistic
from tests.objectives.cases import random_case
from tests.support.ranks import rendezvous

TOKENS = 60


def call():
    case = random_case(2, tokens=TOKENS)
    given = {name: value for name, value in case.call.items() if name not in ("topk", "sequence_ids")}
    return {**given, "old_logprob": given["rollout_logprob"] + torch.linspace(-0.8, 0.3, TOKENS, dtype=torch.float64)}


def some(whole, part):
    return {name: value[part] for name, value in whole.items()}


def step(whole, parts):
    names = ("old_logprob", "rollout_logprob", "mask", "advantage")
    each = [some(whole, part) for part in parts]
    micro = [SimpleNamespace(**{name: of[name] for name in names}, tensors=of) for of in each]
    return SimpleNamespace(updates=[SimpleNamespace(micro_batches=micro[:2]), SimpleNamespace(micro_batches=micro[2:])])


LAYOUT = SimpleNamespace(device=torch.device("cpu"), data_group=SimpleNamespace(size=lambda: 1), world_size=1)


@pytest.mark.parametrize("name", ["m2po", "ess_adaptive"])
def test_micro_batches_do_not_matter(name):
    whole, objective = call(), build_objective(name)
    parts = torch.arange(TOKENS).split(17)
    of_step = with_batch_statistic(objective, step(whole, parts), LAYOUT)
    expected = objective(**whole)  # without a statistic the call is the batch
    loss = torch.cat([of_step(**some(whole, part)).loss for part in parts])
    torch.testing.assert_close(loss, expected.loss, rtol=1e-12, atol=1e-12)
    alone = torch.cat([objective(**some(whole, part)).loss for part in parts])
    assert not torch.allclose(alone, expected.loss)


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_the_statistic_and_the_loss_read_the_advantage_of_a_sampled_teacher(weight):
    whole, parts = call(), torch.arange(TOKENS).split(17)
    gap = torch.linspace(-0.9, 0.9, TOKENS, dtype=torch.float64).roll(7)
    rewarded = with_batch_statistic(build_objective("m2po"), step(whole, parts), LAYOUT)
    summed = whole | {"advantage": weight * whole["advantage"] + 5 * gap.clamp(-0.4, 0.4)}
    expected = with_batch_statistic(build_objective("m2po"), step(summed, parts), LAYOUT)
    axes = {"distillation": "sampled", "distillation_coefficient": 5.0, "distillation_clip": 0.4}
    whole |= {"teacher_logprob": whole["old_logprob"] + gap}
    found = with_batch_statistic(build_objective("m2po", **axes, advantage_weight=weight), step(whole, parts), LAYOUT)
    assert found.statistic == expected.statistic != rewarded.statistic
    absent = torch.full((TOKENS, 1), -1)
    lists = TopKLogprobs(absent, absent * 1.0, absent * 1.0, torch.zeros(TOKENS).double() - 9, absent[:, 0])
    for moved in (0.0, 0.2):  # in the first and in a later update
        policy = {"logprob": whole["logprob"].detach() - moved}
        out, plain = found(**whole | policy, teacher=lists), expected(**summed | policy)
        torch.testing.assert_close(out.loss, plain.loss, rtol=1e-12, atol=1e-12)
        assert torch.equal(out.masked_tokens, plain.masked_tokens)


def test_the_statistic_is_of_all_data_parallel_ranks(monkeypatch):
    """The second rank adds the sums of the first."""
    whole, objective, parts = call(), build_objective("ess_adaptive"), torch.arange(TOKENS).split(15)
    layout = SimpleNamespace(**vars(LAYOUT) | {"data_group": SimpleNamespace(size=lambda: 2)})
    reduced = []
    monkeypatch.setattr(dist, "all_reduce", lambda sums, group: reduced.append(sums.clone()) or sums.add_(reduced[0]))
    with_batch_statistic(objective, step(whole, parts[:2]), layout)
    second = with_batch_statistic(objective, step(whole, parts[2:]), layout)
    assert second.statistic == pytest.approx(with_batch_statistic(objective, step(whole, parts), LAYOUT).statistic)


def decide(rank, directory):
    """Return the statistic of ranks with the same tokens but different rounding."""
    rendezvous(directory)
    dist.init_process_group("gloo")
    try:
        whole = call()
        whole["old_logprob"] = whole["old_logprob"] * (1 + 0.1 * rank)  # more than rounding: to be seen at once
        objective, parts = build_objective("ess_adaptive"), torch.arange(TOKENS).split(17)
        layout = SimpleNamespace(**vars(LAYOUT) | {"world_size": 2})
        return float(with_batch_statistic(objective, step(whole, parts), layout).statistic)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_that_hold_the_same_tokens_take_the_same_number(ranks, tmp_path):
    first, second = ranks(2).run(decide, directory=tmp_path)
    assert first == second


def test_most_objectives_ask_for_none_and_a_step_may_be_empty():
    plain = build_objective("ppo")
    assert with_batch_statistic(plain, step(call(), torch.arange(TOKENS).split(17)), LAYOUT) is plain
    m2po = build_objective("m2po")
    assert with_batch_statistic(m2po, SimpleNamespace(updates=[]), LAYOUT) is m2po


def test_kept_tokens_stay_within_the_budget():
    whole = call()
    out = build_objective("m2po")(**whole)
    moved = whole["old_logprob"] - whole["rollout_logprob"]
    away, kept = (whole["advantage"] * moved > 0) & whole["mask"], out.weight != 0
    assert kept[whole["mask"] & ~away].all()  # a token that comes back towards the rollout policy is never dropped
    squares, kept = moved[away].square(), kept[away]
    assert squares[kept].mean() < 0.04 < squares.mean()
    assert squares[kept].max() < squares[~kept].min()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [(356.0,), (720.0, 1.0), (-400.0,), (-400.0,) * 6])
def test_a_ratio_that_overflows_leaves_loss_and_gradient_finite(far, dtype):
    """The effective share comes from a log-sum-exp, which cannot overflow; e^355 squared does in fp64."""
    moved = torch.zeros(6, dtype=dtype)
    moved[: len(far)] = torch.tensor(far, dtype=dtype)
    mu = torch.full((6,), -1.0, dtype=dtype) - moved.clamp(min=0)
    logprob = (mu + moved).requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0, 0.0], dtype=dtype)
    objective = build_objective("ess_adaptive")
    given = {"rollout_logprob": mu, "old_logprob": mu + moved, "advantage": advantage}
    mask = torch.ones(6, dtype=torch.bool)
    share = objective.with_statistic(objective.statistic_sums(mask=mask, **given)).statistic
    exact = (2 * moved.double().logsumexp(0) - (2 * moved.double()).logsumexp(0)).exp() / 6
    torch.testing.assert_close(share, exact, rtol=1e-6, atol=0)
    out = objective(logprob=logprob, mask=mask, **given)
    out.loss.sum().backward()
    assert out.loss.isfinite().all()
    assert logprob.grad.isfinite().all()
    kl = torch.where(moved.abs() > 10, 1.0, -torch.expm1(-moved))  # the derivative of ln r + 1 / r - 1, 1 / r bounded
    expected = -advantage * torch.minimum(moved.exp(), share.to(dtype)) + (1 - share.to(dtype)) * kl
    torch.testing.assert_close(logprob.grad, expected, rtol=1e-5, atol=1e-7)
