"""Published environments of verifiers, which only the worker processes have installed (`make test-verifiers`)."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.rollout.environments.test_episodes import assert_exact, play, text_of
from tests.support.audit import audit

pytestmark = pytest.mark.integrations

PLAY = "dppo_megatron.rollout.environments.adapters.verifiers:play"
VERIFIERS = os.path.relpath(Path(sys.prefix, "verifiers"))
WORDLE = {"id": "textarena", "game": "Wordle-v0"}


def episodes(tokenizer, policy, env, *, idx=0, **settings):
    """Return the group of task `idx`, and check that it has each sampled turn once."""
    (group,), _, requests = play(
        tokenizer, PLAY, policy, agent=True, chat=True, columns={"idx": idx}, longest=600, timeout_s=300,
        settings={"env": env, "path": VERIFIERS}, **settings,
    )  # fmt: skip
    audited = audit([group])
    assert audited.problems == []
    assert audited.counts["turns"] == len(requests)
    if audited.counts["branches"] == audited.counts["trajectories"]:
        assert_exact(group, requests)
    return group


@pytest.mark.smoke
def test_a_taskset_with_a_tool_and_two_rewards(tokenizer, monkeypatch, caplog):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    call = '<tool_call>{{"name": "{}", "arguments": {{"text": "stop"}}}}</tool_call>'

    def policy(before: str) -> str:
        return [call.format("letters_last"), call.format("last"), "pots"][before.count("<tool>")]

    env = {"taskset": {"id": "verifiers_tasks"}}
    group = episodes(tokenizer, policy, env, idx=1)
    assert group.prompt.text == "[letters_last]<system>Be brief.<user>Reverse stop<assistant>"
    assert text_of(tokenizer, group) == (
        f"{call.format('letters_last')}<eos><tool>p<assistant>{call.format('last')}<eos><tool>error: no such tool"
        "<assistant>pots<eos>"
    )
    assert group.rewards.tolist() == [3.0, 3.0]  # 2 for the answer, 0.5 for each answer of a tool
    group = episodes(tokenizer, policy, env, idx=2, samples=1)
    assert group.reward_failed.all()
    assert "idx = 2: " in caplog.text


@pytest.fixture
def words(tmp_path, monkeypatch):
    """The files that nltk would fetch, with two words: the basic one is the secret, both are English."""
    tagger = "averaged_perceptron_tagger_eng"
    contents = {f"taggers/{tagger}/{tagger}.{part}.json": {} for part in ("weights", "tagdict")}
    contents[f"taggers/{tagger}/{tagger}.classes.json"] = ["NN"]
    files = {name: json.dumps(content) for name, content in contents.items()}
    files |= {"corpora/words/README": "", "corpora/words/en": "plant\nstone", "corpora/words/en-basic": "stone"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nor does it fetch them where it could


def test_wordle(tokenizer, words):
    def policy(before: str) -> str:
        return "[stone]" if "P L A N T" in before else "[plant]"

    group = episodes(tokenizer, policy, {"taskset": WORDLE}, samples=2)
    assert group.prompt.text.startswith("<system>You are a competitive game player.")
    assert "A secret 5-letter word has been chosen. You have 6 attempts" in group.prompt.text
    said = "[plant]<eos><user>P L A N T\nX X X G Y\nYou have 5 guesses left.<assistant>[stone]<eos>"
    assert [text_of(tokenizer, group, sample) for sample in (0, 1)] == [said, said]
    assert group.rewards.tolist() == [1.0, 1.0]
    assert [rollout.finish_reason for rollout in group.rollouts] == ["stop", "stop"]
    group = episodes(tokenizer, policy, {"taskset": WORDLE}, samples=1, max_turns=1)
    assert text_of(tokenizer, group) == "[plant]<eos>"
    assert group.rollouts[0].finish_reason == "max_turns"
    assert group.rewards.tolist() == [0.0]
    assert not group.reward_failed.any()


def test_a_seat_that_is_not_to_be_trained_may_not_have_the_policy(tokenizer, words, caplog):
    user = {"harness": {"id": "dppo_megatron"}, "max_turns": 2}
    env = {"id": "user-sim", "taskset": WORDLE, "persona": "{scenario}", "user": user}
    group = episodes(tokenizer, ["Hi"], env, samples=1)
    assert len(group.rollouts) == 2  # a branch of each
    assert group.reward_failed.all()
    assert "2 agents use the policy" in caplog.text
