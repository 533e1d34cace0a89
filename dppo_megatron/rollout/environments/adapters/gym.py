"""Adapt environments with Gymnasium's `reset` and `step` and with text observations."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from dppo_megatron.rollout.environments.interface import EnvironmentFailed, EnvironmentNameError
from dppo_megatron.rollout.rewards.registry import load_attribute
from dppo_megatron.types import Prompt

from . import seed_of


class Gym:
    """Wraps an environment created by `make(**arguments)`: `gymnasium:make`, `gem:make`, or a class.

    An action is the turn text, read as a number if the action space is `Discrete`.
    """

    def __init__(self, make: str = "gymnasium:make", arguments: dict[str, Any] | None = None, render: bool = False):
        """Create the environment.

        render: the policy reads `render()` (with Gymnasium's render_mode ansi), not the observation.
        """
        self._env = load_attribute("environment.settings.make", make, EnvironmentNameError)(**(arguments or {}))
        self._render = render

    def reset(self, prompt: Prompt, seed: int) -> str:
        observation = self._env.reset(seed=seed_of(prompt, seed))
        return self._text(observation[0] if isinstance(observation, tuple) else observation)

    def step(self, text: str) -> tuple[str, float | None, bool]:
        action: Any = text
        space = getattr(self._env, "action_space", None)
        if (size := getattr(space, "n", None)) is not None:
            first = int(getattr(space, "start", 0))
            try:
                action = int(text)
            except ValueError:
                action = first - 1
            if not first <= action < first + size:
                return f"expected a number from {first} to {first + int(size) - 1}", 0.0, False
        observation, reward, *done_flags, _ = self._env.step(action)  # done_flags: terminated, truncated; done
        return self._text(observation), float(reward), any(done_flags)

    def _text(self, observation: Any) -> str:
        text = self._env.render() if self._render else observation
        if not isinstance(text, str | Integral):
            raise EnvironmentFailed(
                "raised", f"its observations are {type(text).__name__}, not text; set environment.settings.render"
            )
        return str(text)
