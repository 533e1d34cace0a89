"""The audit counts tokens by origin, and finds turns that are trained on twice, not at all, or changed."""

from dataclasses import replace

import numpy as np
import pytest

from dppo_megatron.bank.audit import Turn
from dppo_megatron.bank.checks import check_group
from dppo_megatron.rollout.environments.dialogue import as_rollout
from dppo_megatron.types import ENVIRONMENT, INHERITED, POLICY, Prompt, Rollout, RolloutGroup
from tests.rollout.environments.test_dialogue import REASONER, TRIMMED, begin, play
from tests.support.audit import audit
from tests.support.corruptions import FROM_THE_ENGINES_RECORD, swallowed

TURNS = [("a !b", "one"), (" c!d ", "two"), ("e", "")]


@pytest.fixture(scope="module")
def sampled(tokenizer) -> tuple[RolloutGroup, dict[Turn, Rollout]]:
    """A group of three trajectories, two of which branch, and every turn as it was sampled."""
    rows, returned = [], {}
    for number, template in enumerate((TRIMMED, REASONER, TRIMMED)):
        dialogue = begin(tokenizer, template)
        for turn, rollout in enumerate(play(tokenizer, dialogue, TURNS[: number + 2])):
            returned[7, number, turn] = rollout
        prompt = dialogue.branches[0][0]
        branches = (as_rollout(b, len(prompt.token_ids), "stop", number) for b in dialogue.finished())
        rows += [replace(branch, routed_experts=None) for branch in branches]  # a corruption need not fit them
    return group_of(prompt.token_ids, rows), returned


def group_of(prompt: np.ndarray, rows: list[Rollout]) -> RolloutGroup:
    rewards = np.zeros(len(rows), np.float32)
    group = RolloutGroup(Prompt(7, 7, prompt, "", ""), tuple(rows), rewards, rewards > 0, 1.0)
    check_group(group)
    return group


def test_everything_is_counted(sampled):
    group, returned = sampled
    result = audit([group], returned)
    assert result.problems == []
    of_origin = np.zeros(3, int)
    for rollout in group.rollouts:
        np.add.at(of_origin, rollout.spans[:, 0], rollout.spans[:, 1])
    assert result.counts == {
        "groups": 1, "trajectories": 3, "failed trajectories": 0, "branches": len(group.rollouts), "turns": 2 + 3 + 3,
        "policy tokens": of_origin[POLICY], "environment tokens": of_origin[ENVIRONMENT],
        "inherited tokens": of_origin[INHERITED], "tokens that carry loss": of_origin[POLICY],
    }  # fmt: skip
    assert min(of_origin) > 0
    assert of_origin[POLICY] == sum(len(rollout.token_ids) for rollout in returned.values())
    assert str(result).endswith("; 0 problems")


@pytest.mark.parametrize("damage", FROM_THE_ENGINES_RECORD, ids=lambda d: d.__name__)
def test_planted_damage_is_found(sampled, damage):
    """The damage that a bank on its own reveals is in tests/bank/test_audit_command.py."""
    group, returned = sampled
    wrong = damage(group)
    assert audit([wrong]).problems == []
    problems = audit([wrong], returned).problems
    assert any(FROM_THE_ENGINES_RECORD[damage] in problem for problem in problems), problems


def test_a_turn_that_no_span_holds_is_found(sampled):
    group, returned = sampled
    problems = audit([swallowed(group)], returned).problems
    assert any("turn 0: sampled, but in no policy span" in problem for problem in problems), problems


def test_a_turn_that_was_never_sampled_is_found(sampled):
    group, returned = sampled
    fewer = {turn: rollout for turn, rollout in returned.items() if turn != (7, 1, 0)}
    assert audit([group], fewer).problems == ["prompt 7, trajectory 1, turn 0: a policy span that was never sampled"]
