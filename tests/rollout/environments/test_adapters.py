"""Environments in the shape of other packages, which tests/integrations plays as published."""

import random

import numpy as np
import pytest

from dppo_megatron.rollout.environments import EnvironmentFailed, EnvironmentNameError
from dppo_megatron.rollout.environments.adapters.gym import Gym
from dppo_megatron.rollout.environments.adapters.trl import FactoryEnvironment
from dppo_megatron.types import Prompt
from tests.rollout.environments.test_episodes import assert_exact, play, text_of

GYM = "dppo_megatron.rollout.environments.adapters.gym:Gym"
TRL = "dppo_megatron.rollout.environments.adapters.trl:FactoryEnvironment"


def prompt(**columns) -> Prompt:
    return Prompt(0, 0, np.zeros(1, np.int32), "", "", columns)


class Guess:
    """The number that the seed leaves; `old`: as Gym was before Gymnasium."""

    def __init__(self, old=False):
        self.old = old

    def reset(self, *, seed):
        self.number = seed % 10
        return "guess:" if self.old else ("guess:", {})

    def step(self, action):
        over = (int(action) == self.number,) if self.old else (int(action) == self.number, False)
        return f"not {action}:", 1.0 if over[0] else -0.5, *over, {}


class Counter:
    """An environment in TRL's convention."""

    def reset(self, start=0, **_):
        self.count = int(start)
        self.dice = [random.random(), float(np.random.random())]
        return f" from {self.count}"

    def add(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: what is added

        Returns:
            The count.
        """
        self.count += step
        return self.count

    def _hidden(self): ...

    def get_reward(self):
        return float(self.count)


class Unscored(Counter):
    get_reward = None


class Pictures(Counter):
    def reset(self, **_):
        return [{"type": "image"}]


@pytest.mark.slow
def test_gym_before_gymnasium(tokenizer):
    settings = {"make": f"{__name__}:Guess", "arguments": {"old": True}}
    (group,), _, requests = play(tokenizer, GYM, ["3", "4", "7"], settings=settings, columns={"seed": 17}, samples=1)
    assert_exact(group, requests)
    assert tokenizer.decode(group.prompt.token_ids) == "Higuess:"
    assert text_of(tokenizer, group) == "3<eos>not 3:4<eos>not 4:7<eos>"
    assert group.rewards.tolist() == [0.0]
    assert [len(span) for span in group.rollouts[0].spans] == [3] * 5


def test_gym_refuses_an_unknown_environment_and_an_array_observation():
    with pytest.raises(EnvironmentNameError, match=r"environment.settings.make = .*did you mean 'Guess'"):
        Gym(f"{__name__}:Gues")
    env = Gym(f"{__name__}:Guess")
    env._env.reset = lambda seed: (np.zeros(3), {})
    with pytest.raises(EnvironmentFailed, match="ndarray, not text"):
        env.reset(prompt(), 0)
    env._env.reset = lambda seed: (np.int64(3), {})
    assert env.reset(prompt(), 0) == "3"


@pytest.mark.slow
def test_trl(tokenizer):
    call = '<tool_call>{"name": "add", "arguments": {"step": 4}}</tool_call>'
    wrong = '<tool_call>{"name": "add", "arguments": {"step": "x"}}</tool_call>'
    (group,), _, requests = play(
        tokenizer, TRL, [call, wrong, "done"], chat=True, longest=600,
        settings={"factory": f"{__name__}:Counter"}, columns={"start": "5"},
    )  # fmt: skip
    assert_exact(group, requests)
    assert tokenizer.decode(group.prompt.token_ids) == "[add]<user>Hi from 5<assistant>"
    text = text_of(tokenizer, group)
    assert text.startswith(f"{call}<eos><tool>9<assistant>{wrong}<eos><tool>error: ValueError: step: ")
    assert text.endswith("<assistant>done<eos>")
    assert group.rewards.tolist() == [9.0, 9.0]


def test_trl_alike_for_a_group_and_refused_where_it_is_not():
    environments = [FactoryEnvironment(f"{__name__}:Counter") for _ in range(3)]
    for environment, seed in zip(environments, (3, 3, 4), strict=True):
        environment.reset(prompt(), seed)
    dice = [environment._env.dice for environment in environments]
    assert dice[0] == dice[1] != dice[2]
    assert [tool.__name__ for tool in environments[0].tools] == ["add"]
    assert not hasattr(FactoryEnvironment(f"{__name__}:Unscored"), "reward")
    with pytest.raises(EnvironmentNameError, match="Guesser has no method reset"):
        FactoryEnvironment(f"{__name__}:Guesser")
    with pytest.raises(EnvironmentFailed, match="reset returned list"):
        FactoryEnvironment(f"{__name__}:Pictures").reset(prompt(), 0)


class Guesser: ...
