"""A group that is given up: its processes, requests to engines and open turns of agents are gone within a second."""

import asyncio
import time
from contextlib import AsyncExitStack

import numpy as np
import pytest
from transformers import AutoTokenizer

from dppo_megatron.bank.journal import Journals
from dppo_megatron.rollout.environments.episodes import Episodes
from dppo_megatron.rollout.environments.pool import EnvironmentPool
from dppo_megatron.rollout.gateway import Gateway
from dppo_megatron.rollout.rewards import RewardPool
from dppo_megatron.types import Prompt, Rollout
from tests.rollout.environments.test_episodes import EOS, TOOLS, WORLDS
from tests.rollout.gateway import agents
from tests.support.configs import make_config
from tests.support.tokenizers import save_character_model

pytestmark = pytest.mark.slow
SAMPLES = 3


class Policy:
    """Answers a word, or never where it `hangs`."""

    def __init__(self, hangs: bool):
        self.hangs, self.asked, self.cancelled = hangs, 0, 0

    async def sample(self, make, what):
        make(0)
        self.asked += 1
        try:
            await asyncio.sleep(60 if self.hangs else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return (Rollout(np.array([5, EOS], np.int32), -np.ones(2, np.float32), np.zeros(2, np.int32), "stop"),)


@pytest.mark.parametrize("waits_for", ["environment", "engine", "engine of an agent", "agent"])
async def test_nothing_of_it_is_left(tmp_path, waits_for):
    tokenizer = AutoTokenizer.from_pretrained(save_character_model(tmp_path / "m"))
    tokenizer.chat_template = TOOLS
    policy, agent = Policy(waits_for.startswith("engine")), "agent" in waits_for
    source = {"name": f"{WORLDS}:Hostile"}
    if agent:
        source = {"agent": f"{agents.__name__}:{'hangs' if waits_for == 'agent' else 'talks'}"}
    config = make_config(
        rollout={"group_size": SAMPLES, "max_response_tokens": 200},
        data={"train": "unused", "chat_template": True},
        environment={**source, "workers": SAMPLES},
        reward={"name": "tests.support.rewards:even_digits"},
    )

    async with AsyncExitStack() as pools:
        environments = pools.enter_context(EnvironmentPool(config.environment))
        gateway = await pools.enter_async_context(Gateway("127.0.0.1"))
        journals = Journals(tmp_path / "journals", ())
        episodes = Episodes(
            config, sample=policy.sample, environments=environments, tokenizer=tokenizer, tools=[],
            stop_token_ids=(EOS,), routing=None, journals=journals, gateway=gateway if agent else None,
        )  # fmt: skip
        rewards = pools.enter_context(RewardPool(config.reward))
        text = "<user>Hi<assistant>"
        ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        prompt = Prompt(0, 0, ids, text, "hang step", {"prompt": "Hi"})
        playing = asyncio.create_task(episodes.play(prompt, rewards))
        async with asyncio.timeout(60):
            while policy.asked < SAMPLES:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)  # the policy's turns are on their way
        processes = [worker._process for worker in environments._pool._workers]
        assert len(processes) == SAMPLES
        given_up = time.monotonic()
        playing.cancel()
        await asyncio.wait([playing])
        journals.remove(0)
        alive = waits_for == "engine"  # its environments wait for a turn, and serve other trajectories next

        def left() -> bool:
            kept = any(process.poll() is None for process in processes)
            return kept != alive or environments._free._count < SAMPLES or any((tmp_path / "journals").iterdir())

        while left():
            assert time.monotonic() - given_up < 1
            await asyncio.sleep(0.01)
        assert policy.cancelled == (SAMPLES if policy.hangs else 0)
        assert gateway._sessions == {}
        if waits_for == "engine of an agent":  # and another group finds its places
            policy.hangs = False
            group = await asyncio.wait_for(episodes.play(prompt, rewards), 60)
            assert not group.reward_failed.any()
        journals.close()
