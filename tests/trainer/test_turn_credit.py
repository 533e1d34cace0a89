"""Every turn has its own advantage, from the bank to the gradient."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from dppo_megatron.bank import BankReader, BankWriter
from dppo_megatron.checks import settings_problems
from dppo_megatron.objectives import build_objective, sequence_ids_from_cu_seqlens
from dppo_megatron.trainer.batches import BankBatches
from dppo_megatron.types import POLICY
from tests.support.configs import make_config
from tests.support.tiny_task import task_config
from tests.support.turns import with_turns
from tests.trainer.test_bank_batches import LONGEST, SAMPLES
from tests.trainer.test_bank_batches import _group as group_of

VOCAB = 16
# Trajectories of two turns, the first with two branches; one turn of two tokens; one that failed.
REWARDS = [2.0, 0.0, 1.0, 0.0]
TURN_REWARDS = ([0.5, 1.0], [0.5, -0.5], [1.0], [7.0, 7.0])
# By hand. The first has earned 0.5 more than its turns say, in its last. Returns at a discount of 1/2:
#   0.5 + 1.5 / 2 = 1.25, 1.5;  0.5 - 0.5 / 2 = 0.25, -0.5;  1.  Means by turn: 2.5 / 3 and 0.5.
ADVANTAGES = ([5 / 12, 1.0], [-7 / 12, -1.0], [1 / 6])


def bank_with(directory, turn_rewards=TURN_REWARDS):
    group = with_turns(group_of(1, [(5, False, 2.0), (4, False, 0.0), (2, False, 1.0), (6, True, 0.0)]))
    rng = np.random.default_rng(3)
    rollouts = tuple(
        replace(r, token_ids=rng.integers(1, VOCAB, len(r.token_ids)).astype(np.int32)) for r in group.rollouts
    )
    given = None if turn_rewards is None else tuple(np.array(of, np.float32) for of in turn_rewards)
    failed = np.array([r.trajectory == 3 for r in rollouts])
    group = replace(group, rollouts=rollouts, reward_failed=failed, turn_rewards=given)
    with BankWriter(directory / "bank", 1) as bank:
        bank.append(group)
    return group


def read(directory, objective="dppo_binary_tv", **chosen):
    config = task_config(
        directory,
        train={"updates_per_step": 1, "micro_batch_tokens": 1000},
        rollout={"prompts_per_step": 1, "group_size": SAMPLES, "max_response_tokens": LONGEST},
        objective={"name": objective, "credit": "turn", "discount": 0.5, **chosen},
    )
    built = build_objective(config.objective.name, **config.objective.settings)
    return built, BankBatches(config, BankReader(directory / "bank"), built, 0, 1).read(0)


def sampled_tokens(group):
    """(sample, trajectory, turn, token) of every token of the policy, in order; the prompt has two."""
    for i, rollout in enumerate(group.rollouts):
        spans = [[POLICY, len(rollout.token_ids), 0]] if rollout.spans is None else rollout.spans.tolist()
        place = 0
        for origin, tokens, turn in spans:
            for token in rollout.token_ids[place : place + tokens]:
                if origin == POLICY:
                    yield i, rollout.trajectory, turn, int(token)
            place += tokens


def test_every_sampled_token_carries_its_turns_advantage(tmp_path):
    group = bank_with(tmp_path)
    _, batch = read(tmp_path)
    (micro,) = batch.updates[0].micro_batches
    expected = [ADVANTAGES[t][turn] for _, t, turn, _ in sampled_tokens(group) if t != 3]
    assert len(group.rollouts) == 5
    np.testing.assert_allclose(micro.advantage[micro.mask].numpy(), expected, rtol=1e-6)
    assert batch.metrics["rollout/groups_without_signal"] == 0


def test_a_group_whose_first_turns_agree_learns_from_the_later_ones(tmp_path):
    """At a discount of 1/2 both return 1 from their first turn on: 0.5 + 1 / 2 and 1.5 - 1 / 2. Two more failed."""
    group = with_turns(group_of(1, [(5, False, 1.5), (4, False, 0.5), (2, True, 0.0), (6, True, 0.0)]))
    failed = np.array([r.trajectory >= 2 for r in group.rollouts])
    turn_rewards = tuple(np.array(of, np.float32) for of in ([0.5, 1.0], [1.5, -1.0], [], []))
    rollouts = tuple(replace(r, token_ids=r.token_ids % VOCAB) for r in group.rollouts)
    with BankWriter(tmp_path / "bank", 1) as bank:
        bank.append(replace(group, rollouts=rollouts, reward_failed=failed, turn_rewards=turn_rewards))
    _, batch = read(tmp_path)
    (micro,) = batch.updates[0].micro_batches
    assert batch.metrics["rollout/groups_without_signal"] == 0
    assert sorted(set(micro.advantage[micro.mask].tolist())) == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("objective", ["dppo_binary_tv", "gspo"])
def test_gradients_equal_a_dense_reference(tmp_path, objective):
    """- A r w (e_a - pi) / (sequences x horizon) of every row, by the turns of the group as they were sampled."""
    group = bank_with(tmp_path)
    method, batch = read(tmp_path, objective)
    (micro,) = batch.updates[0].micro_batches
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(len(micro.token_ids), VOCAB, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logprob = logits.log_softmax(1).gather(1, micro.target_ids[:, None])[:, 0]
    close = torch.where(micro.mask, logprob.detach() + 1e-4 * torch.sin(torch.arange(len(logits))), 0.0)
    out = method(
        logprob=logprob, rollout_logprob=close, advantage=micro.advantage, mask=micro.mask,
        sequence_ids=sequence_ids_from_cu_seqlens(micro.cu_seqlens, len(logits)),
    )  # fmt: skip
    (out.loss * micro.loss_weight).sum().backward()
    rows = micro.mask.nonzero()[:, 0].tolist()
    tokens = [(i, t, turn, token) for i, t, turn, token in sampled_tokens(group) if t != 3]
    mu, pi = close.exp(), logprob.detach().exp()
    expected = torch.zeros_like(logits)
    for row, (i, t, turn, token) in zip(rows, tokens, strict=True):
        of_response = [other for other, (j, *_) in zip(rows, tokens, strict=True) if j == i]
        r = pi[row] / mu[row]
        if objective == "gspo":  # the geometric mean over the branch; it is near 1, within the region
            r = (pi[of_response] / mu[of_response]).log().mean().exp()
        e_a = torch.zeros(VOCAB, dtype=torch.float64)
        e_a[token] = 1
        softmax = logits.detach()[row].softmax(0)
        weight = 1 / (3 * LONGEST)
        expected[row] = -weight * ADVANTAGES[t][turn] * r * (e_a - softmax)
    torch.testing.assert_close(logits.grad, expected, atol=1e-9, rtol=1e-5)


def test_a_trajectory_without_rewards_of_turns_is_credited_as_a_whole(tmp_path):
    group = bank_with(tmp_path, (*TURN_REWARDS[:2], [], TURN_REWARDS[3]))
    _, batch = read(tmp_path)
    (micro,) = batch.updates[0].micro_batches
    expected = [ADVANTAGES[t][turn] for _, t, turn, _ in sampled_tokens(group) if t != 3]
    np.testing.assert_allclose(micro.advantage[micro.mask].numpy(), expected, rtol=1e-6)


def test_a_bank_without_rewards_of_turns_is_refused(tmp_path):
    bank_with(tmp_path, None)
    with pytest.raises(ValueError, match=r"objective.credit = turn: .*prompt 1, have no rewards of turns; set it"):
        read(tmp_path)


def test_a_bank_with_too_few_of_them_is_refused(tmp_path):
    bank_with(tmp_path, ([0.5], *TURN_REWARDS[1:]))
    with pytest.raises(ValueError, match=r"prompt 1 in the bank has rewards of only 1 turns of trajectory 0, .*1 was"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "objective.credit = turn: .*environment.name is not set"),
        ({"environment": {"agent": "a:b"}}, "objective.credit = turn: .*environment.name is not set"),
        ({"objective": {"credit": "turn", "advantage": "batch_mean"}}, "objective.advantage = batch_mean: "),
        ({"rollout": {"dynamic_sampling": True}}, "rollout.dynamic_sampling = true: drops groups of equal rewards"),
        ({"objective": {"discount": 0.9}}, "objective.discount = 0.9: .*set objective.credit to turn"),
    ],
)
def test_what_has_no_meaning_is_refused(changes, says):
    config = make_config(**{"objective": {"credit": "turn"}, **changes})
    assert any(re.search(says, problem) for problem in settings_problems(config)), settings_problems(config)
    fine = make_config(objective={"credit": "turn", "discount": 0.9}, environment={"name": "a:b"})
    assert settings_problems(fine) == []
