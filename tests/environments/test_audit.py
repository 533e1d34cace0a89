"""The audit counts tokens by origin, and finds turns that are trained on twice, not at all, or changed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from transformers import AutoTokenizer

from dppo_megatron.bank.audit import Turn, audit
from dppo_megatron.bank.checks import check_group
from dppo_megatron.environments.dialogue import as_rollout
from dppo_megatron.types import ENVIRONMENT, INHERITED, POLICY, Prompt, Rollout, RolloutGroup
from tests.environments.test_dialogue import REASONER, TRIMMED, begin, play
from tests.support.tokenizers import save_character_model

TURNS = [("a !b", "one"), (" c!d ", "two"), ("e", "")]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory) -> tuple[RolloutGroup, dict[Turn, Rollout]]:
    """A group of three trajectories, two of which branch, and every turn as it was sampled."""
    tokenizer = AutoTokenizer.from_pretrained(save_character_model(tmp_path_factory.mktemp("tokenizer") / "m"))
    rows, returned = [], {}
    for number, template in enumerate((TRIMMED, REASONER, TRIMMED)):
        dialogue = begin(tokenizer, template)
        for turn, rollout in enumerate(play(tokenizer, dialogue, TURNS[: number + 2])):
            returned[7, number, turn] = rollout
        prompt = dialogue.branches[0][0]
        rows += [as_rollout(b, len(prompt.token_ids), "stop", number) for b in dialogue.finished()]
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


def only_of(rollout: Rollout, keep: np.ndarray) -> Rollout:
    names = ("rollout_logprob", "versions", "topk_ids", "rollout_topk_logprob")
    return dataclasses.replace(rollout, **{name: getattr(rollout, name)[keep] for name in names})


def damaged(group: RolloutGroup) -> dict[str, tuple[int, Rollout]]:
    """(branch, its damaged rollout), by the damage."""
    branched = next(i for i, r in enumerate(group.rollouts) if (r.spans[:, 0] == INHERITED).any())
    heir, first = group.rollouts[branched], group.rollouts[0]
    at = int(np.flatnonzero(heir.spans[:, 0] == INHERITED)[0])
    size = int(heir.spans[at, 1])
    twice = heir.spans.copy()
    twice[at, 0] = POLICY
    again = only_of(heir, np.concatenate([np.zeros(size, int), np.arange(len(heir.versions))]))
    other = heir.token_ids.copy()
    other[int(heir.spans[:at, 1].sum())] ^= 1
    lost = first.spans.copy()
    lost[0, 0] = ENVIRONMENT
    own = np.arange(len(first.versions))
    size = int(first.spans[0, 1])
    early = np.concatenate([[[POLICY, size - 1, 0], [ENVIRONMENT, 1, 0]], first.spans[1:]]).astype(np.int32)
    return {
        "trained twice": (branched, dataclasses.replace(again, spans=twice)),
        "inherited otherwise": (branched, dataclasses.replace(heir, token_ids=other)),
        "not trained": (0, dataclasses.replace(only_of(first, own[own >= size]), spans=lost)),
        "another's log-prob": (0, dataclasses.replace(first, rollout_logprob=first.rollout_logprob - 1)),
        "a span that ends early": (0, dataclasses.replace(only_of(first, own[own != size - 1]), spans=early)),
        "another version": (0, dataclasses.replace(first, versions=first.versions + 1)),
    }  # fmt: skip


WITHOUT_TURNS = {
    "trained twice": "turn 0: in two policy spans",
    "inherited otherwise": "turn 0: inherited otherwise than an earlier branch has it",
    "not trained": "turn 0: in no policy span",
}
WITH_TURNS = {
    "not trained": "turn 0: sampled, but in no policy span",
    "another's log-prob": "turn 0: rollout_logprob differ from what was sampled",
    "a span that ends early": "turn 0: token_ids, rollout_logprob, versions, topk_ids",
    "another version": "turn 0: versions differ from what was sampled",
}


def test_planted_damage_is_found(sampled):
    group, returned = sampled
    for name, (branch, rollout) in damaged(group).items():
        rows = list(group.rollouts)
        rows[branch] = rollout
        wrong = group_of(group.prompt.token_ids, rows)
        for expected, turns in ((WITHOUT_TURNS, None), (WITH_TURNS, returned)):
            problems = audit([wrong], turns).problems
            if name in expected:
                assert any(expected[name] in problem for problem in problems), (name, problems)


def test_a_turn_that_was_never_sampled_is_found(sampled):
    group, returned = sampled
    fewer = {turn: rollout for turn, rollout in returned.items() if turn != (7, 1, 0)}
    assert audit([group], fewer).problems == ["prompt 7, trajectory 1, turn 0: a policy span that was never sampled"]
