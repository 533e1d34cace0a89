"""Environments and an agent of other packages, as published: whole trajectories in worker processes."""

from __future__ import annotations

import re

import pytest
from transformers import AutoTokenizer

from tests.environments.test_episodes import assert_exact, play, text_of
from tests.support.tokenizers import save_character_model

pytestmark = pytest.mark.integrations

REASONING_GYM = "dppo_megatron.environments.adapters.reasoning_gym:ReasoningGym"
GYM = "dppo_megatron.environments.adapters.gym:Gym"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_character_model(tmp_path_factory.mktemp("tokenizer") / "m"))


def test_reasoning_gym(tokenizer):
    def policy(before: str) -> str:
        total = eval(re.search(r"problem: (.*) =", before)[1])
        return f"{total}? <answer> {total} </answer>"

    settings = {"dataset": "chain_sum", "config": {"max_terms": 3}}
    (group, other), _, requests = play(
        tokenizer,
        REASONING_GYM,
        policy,
        answers=("", ""),
        settings=settings,
        longest=60,
    )
    assert_exact(group, [request for request in requests if "-0." in request.request_id])
    assert group.rewards.tolist() == other.rewards.tolist() == [1.0, 1.0]
    assert group.prompt.text.startswith("HiState the final answer to the following arithmetic problem: ")
    assert group.prompt.text != other.prompt.text
    (group,), _, _ = play(
        tokenizer, REASONING_GYM, ["0"], settings={**settings, "tag": None},
        columns={"seed": 3},
    )  # fmt: skip
    assert group.prompt.text.endswith("57 - 87 =")
    assert group.rewards.tolist() == [0.0, 0.0]


def test_gymnasium(tokenizer):
    settings = {"arguments": {"id": "FrozenLake-v1", "is_slippery": False}}
    turns = ["2", "2", "left", "1", "1", "1", "2"]
    (group,), _, requests = play(
        tokenizer,
        GYM,
        turns,
        settings=settings,
        max_turns=len(turns),
        workers=2,
    )
    assert_exact(group, requests)
    said = "2<eos>12<eos>2left<eos>expected a number from 0 to 31<eos>61<eos>101<eos>142<eos>"
    assert text_of(tokenizer, group) == said
    assert [rewards.tolist() for rewards in group.turn_rewards] == [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]] * 2
    assert group.rewards.tolist() == [1.0, 1.0]


def test_an_agent_of_pydantic_ai(tokenizer):
    call = 'so: <tool_call>{"name": "price", "arguments": {"product": "tea"}}</tool_call>'

    def policy(before: str) -> str:
        return "3 euros" if "<tool>3" in before else call

    (group,), _, requests = play(
        tokenizer, "tests.integrations.agents:shops", policy, agent=True, chat=True, text="What is tea?",
        columns={"right": "3 euros"},
    )  # fmt: skip
    assert_exact(group, requests)
    assert group.prompt.text == "[price]<system>Be brief.<user>What is tea?<assistant>"
    assert text_of(tokenizer, group) == f"{call}<eos><tool>3<assistant>3 euros<eos>"
    assert group.rewards.tolist() == [1.0, 1.0]
    assert len(requests) == 4
