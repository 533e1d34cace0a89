"""Environments and an agent of other packages, as published: whole trajectories in worker processes."""

import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import trl
from trl import GRPOConfig, GRPOTrainer

from dppo_megatron.rollout.environments.adapters.reasoning_gym import ReasoningGym
from dppo_megatron.rollout.environments.adapters.trl import FactoryEnvironment
from dppo_megatron.types import Prompt
from tests.integrations.test_trl import policy
from tests.integrations.test_trl import tokenizer as chatless
from tests.rollout.environments.test_adapters import Counter
from tests.rollout.environments.test_episodes import assert_exact, play, text_of

pytestmark = pytest.mark.integrations

OPENENV = "dppo_megatron.rollout.environments.adapters.openenv:OpenEnv"
REASONING_GYM = "dppo_megatron.rollout.environments.adapters.reasoning_gym:ReasoningGym"
GYM = "dppo_megatron.rollout.environments.adapters.gym:Gym"


@pytest.mark.smoke
def test_reasoning_gym(tokenizer):
    def policy(before: str) -> str:
        total = eval(re.search(r"problem: (.*) =", before)[1])
        return f"{total}? <answer> {total} </answer>"

    settings = {"dataset": "chain_sum", "config": {"max_terms": 3}}
    (group, other), _, requests = play(
        tokenizer, REASONING_GYM, policy, answers=("", ""), settings=settings, longest=60
    )
    assert_exact(group, [request for request in requests if "-0." in request.request_id])
    assert group.rewards.tolist() == other.rewards.tolist() == [1.0, 1.0]
    assert group.prompt.text.startswith("HiState the final answer to the following arithmetic problem: ")
    assert group.prompt.text != other.prompt.text
    whole = ReasoningGym(**settings, tag=None)
    prompt = Prompt(0, 0, np.zeros(1, np.int32), "", "", {"seed": 3})
    assert [whole.reset(prompt, seed)[-9:] for seed in (0, 1)] == ["57 - 87 ="] * 2
    assert whole.step(" -30\n") == ("", 1.0, True)


def test_gymnasium(tokenizer):
    settings = {"arguments": {"id": "FrozenLake-v1", "is_slippery": False}}
    turns = ["2", "2", "left", "1", "1", "1", "2"]
    (group,), _, requests = play(tokenizer, GYM, turns, settings=settings, max_turns=len(turns), workers=2)
    assert_exact(group, requests)
    said = "2<eos>12<eos>2left<eos>expected a number from 0 to 31<eos>61<eos>101<eos>142<eos>"
    assert text_of(tokenizer, group) == said
    assert [rewards.tolist() for rewards in group.turn_rewards] == [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]] * 2
    assert group.rewards.tolist() == [1.0, 1.0]


def test_trl_offers_the_same_tools_and_reward(tmp_path):
    speaker = chatless()
    speaker.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text()
    settings = GRPOConfig(output_dir=str(tmp_path), max_steps=1, use_cpu=True, bf16=False, report_to=[])
    theirs = GRPOTrainer(
        policy(f"{tmp_path}/policy"), args=settings, processing_class=speaker, environment_factory=Counter
    )
    ours = FactoryEnvironment(f"{Counter.__module__}:Counter")
    assert [tool.__name__ for tool in theirs.tools] == [tool.__name__ for tool in ours.tools] == ["add"]
    assert theirs.reward_func_names == ["Counter"]
    assert ours.reward.__name__ == "get_reward"


@pytest.fixture(scope="module")
def openenv_url(tmp_path_factory):
    """A server with the environment that `openenv init` writes, which echoes each message."""
    directory, binaries = tmp_path_factory.mktemp("openenv"), Path(sys.executable).parent
    subprocess.run([binaries / "openenv", "init", "parrot"], cwd=directory, check=True, timeout=900)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        descriptor, url = listening.fileno(), f"http://127.0.0.1:{listening.getsockname()[1]}"
        command = [sys.executable, "-m", "uvicorn", "server.app:app", "--fd", str(descriptor)]
        server = subprocess.Popen(command, cwd=directory / "parrot", pass_fds=[descriptor])
        try:
            urllib.request.urlopen(f"{url}/health", timeout=120).close()  # answered once it is up
            yield url
        finally:
            server.kill()
            server.wait()


def test_openenv(tokenizer, openenv_url):
    settings = {"url": openenv_url, "action": "message", "observation": "echoed_message"}
    (group,), _, requests = play(tokenizer, OPENENV, ["ab", "cde"], settings=settings, max_turns=2, workers=1)
    assert_exact(group, requests)
    assert group.prompt.text == "HiParrot environment ready!"
    assert text_of(tokenizer, group) == "ab<eos>abcde<eos>"
    assert [rewards.tolist() for rewards in group.turn_rewards] == [pytest.approx([0.2, 0.3])] * 2
    turns = ["no", '{"massage": "ab"}', '{"message": "ab"}', "-"]
    (group,), _, requests = play(
        tokenizer, OPENENV, turns, settings={"url": openenv_url}, max_turns=4, workers=1, longest=400
    )
    assert_exact(group, requests)
    text = text_of(tokenizer, group)
    assert text.startswith("no<eos>not JSON: ")
    assert "error: Server error: Invalid message" in text
    assert '<eos>{"echoed_message": "ab", "message_length": 2}-<eos>' in text
    assert group.rewards.tolist() == pytest.approx([0.2, 0.2])


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
