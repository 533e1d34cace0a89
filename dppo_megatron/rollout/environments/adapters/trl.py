"""Adapt environments for TRL's `environment_factory`: their public methods are tools."""

from __future__ import annotations

import inspect
import random
from typing import Any

import numpy as np

from dppo_megatron.rollout.environments.interface import EnvironmentFailed, EnvironmentNameError
from dppo_megatron.rollout.rewards.registry import load_attribute
from dppo_megatron.types import Prompt

from . import seed_of


class FactoryEnvironment:
    """Wraps an environment created by `factory(**arguments)`.

    `reset` gets the row's columns. `get_reward`, if it exists, gives the reward; else `reward:` in the config does.
    """

    def __init__(self, factory: str, arguments: dict[str, Any] | None = None):
        self._env = load_attribute("environment.settings.factory", factory, EnvironmentNameError)(**(arguments or {}))
        methods = [name for name, _ in inspect.getmembers(type(self._env), inspect.isfunction)]
        if "reset" not in methods:
            raise EnvironmentNameError(
                f"environment.settings.factory = {factory}: {type(self._env).__name__} has no method reset; add one"
            )
        tools = [name for name in methods if name not in ("reset", "get_reward") and not name.startswith("_")]
        self.tools = [getattr(self._env, name) for name in tools]
        if "get_reward" in methods:
            self.reward = self._env.get_reward

    def reset(self, prompt: Prompt, seed: int) -> str | None:
        # TRL passes no seed; this makes all trajectories of a group start equally.
        random.seed(seed_of(prompt, seed))
        np.random.seed(seed_of(prompt, seed) % 2**32)
        opening = self._env.reset(**prompt.columns)
        if not isinstance(opening, str | None):
            raise EnvironmentFailed("raised", f"reset returned {type(opening).__name__}; the policy reads only text")
        return opening
