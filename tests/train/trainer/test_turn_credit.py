"""Every turn has its own advantage, from the bank to the gradient."""

import re
from dataclasses import replace

import numpy as np
import pytest

from dppo_megatron.run.checks import settings_problems
from dppo_megatron.types import POLICY
from tests.support.configs import make_config
from tests.support.turns import with_turns
from tests.train.trainer.test_bank_batches import _group as group_of
from tests.train.trainer.test_bank_batches import batches, write

# Trajectories of two turns, the first with two branches; one turn of two tokens; one that failed.
TURN_REWARDS = ([0.5, 1.0], [0.5, -0.5], [1.0], [7.0, 7.0])
# By hand. The first has earned 0.5 more than its turns say, in its last. Returns at a discount of 1/2:
#   0.5 + 1.5 / 2 = 1.25, 1.5;  0.5 - 0.5 / 2 = 0.25, -0.5;  1.  Means by turn: 2.5 / 3 and 0.5.
ADVANTAGES = ([5 / 12, 1.0], [-7 / 12, -1.0], [1 / 6])


def read(directory, turn_rewards=TURN_REWARDS):
    """A group with these rewards of turns, and the step that a bank of it gives."""
    group = with_turns(group_of(1, [(5, False, 2.0), (4, False, 0.0), (2, False, 1.0), (6, True, 0.0)]))
    given = None if turn_rewards is None else tuple(np.array(of, np.float32) for of in turn_rewards)
    failed = np.array([r.trajectory == 3 for r in group.rollouts])
    return read_group(directory, replace(group, reward_failed=failed, turn_rewards=given))


def read_group(directory, group):
    write(directory, group)
    train = {"updates_per_step": 1, "micro_batch_tokens": 1000}
    return group, batches(directory, train=train, objective={"credit": "turn", "discount": 0.5}).read(0)


def advantages(group) -> list[float]:
    """The advantage of every token of the policy with loss, in order."""
    out = []
    for rollout in group.rollouts:
        spans = [[POLICY, len(rollout.token_ids), 0]] if rollout.spans is None else rollout.spans.tolist()
        of_turns = [(turn, tokens) for origin, tokens, turn in spans if origin == POLICY and rollout.trajectory != 3]
        out += [ADVANTAGES[rollout.trajectory][turn] for turn, tokens in of_turns for _ in range(tokens)]
    return out


@pytest.mark.parametrize("single", [[1.0], []])  # without rewards of turns a trajectory is credited as a whole
def test_every_sampled_token_carries_its_turns_advantage(tmp_path, single):
    group, batch = read(tmp_path, (*TURN_REWARDS[:2], single, TURN_REWARDS[3]))
    (micro,) = batch.updates[0].micro_batches
    assert len(group.rollouts) == 5
    np.testing.assert_allclose(micro.advantage[micro.mask].numpy(), advantages(group), rtol=1e-6)
    assert batch.metrics["rollout/groups_without_signal"] == 0


def test_a_group_with_equal_returns_of_first_turns_learns_from_later_turns(tmp_path):
    """At a discount of 1/2 both return 1 from their first turn on: 0.5 + 1 / 2 and 1.5 - 1 / 2. Two more failed."""
    group = with_turns(group_of(1, [(5, False, 1.5), (4, False, 0.5), (2, True, 0.0), (6, True, 0.0)]))
    failed = np.array([r.trajectory >= 2 for r in group.rollouts])
    turn_rewards = tuple(np.array(of, np.float32) for of in ([0.5, 1.0], [1.5, -1.0], [], []))
    _, batch = read_group(tmp_path, replace(group, reward_failed=failed, turn_rewards=turn_rewards))
    (micro,) = batch.updates[0].micro_batches
    assert batch.metrics["rollout/groups_without_signal"] == 0
    assert sorted(set(micro.advantage[micro.mask].tolist())) == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("turn_rewards", "says"),
    [
        (None, r"objective.credit = turn: .*prompt 1, have no rewards of turns; set it"),
        (([0.5], *TURN_REWARDS[1:]), r"prompt 1 in the bank has rewards of only 1 turns of trajectory 0, .*1 was"),
    ],
)
def test_a_bank_with_too_few_rewards_of_turns_is_refused(tmp_path, turn_rewards, says):
    with pytest.raises(ValueError, match=says):
        read(tmp_path, turn_rewards)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "objective.credit = turn: .*environment.name is not set"),
        ({"environment": {"agent": "a:b"}}, "objective.credit = turn: .*environment.name is not set"),
        ({"objective": {"credit": "turn", "advantage": "batch_mean"}}, "objective.advantage = batch_mean: "),
        ({"rollout": {"dynamic_sampling": True}}, "rollout.dynamic_sampling = true: drops groups of equal rewards"),
        ({"objective": {"discount": 0.9}}, "objective.discount = 0.9: needs objective.credit = turn"),
    ],
)
def test_settings_without_a_meaning_for_turn_credit_are_refused(changes, says):
    config = make_config(**{"objective": {"credit": "turn"}, **changes})
    assert any(re.search(says, problem) for problem in settings_problems(config)), settings_problems(config)
    fine = make_config(objective={"credit": "turn", "discount": 0.9}, environment={"name": "a:b"})
    assert settings_problems(fine) == []
