"""The interface of environments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from typing_extensions import TypedDict

from dppo_megatron.errors import ExpectedError
from dppo_megatron.types import Prompt


class Message(TypedDict):
    """A message as chat templates read it."""

    role: str
    content: str


class Environment(Protocol):
    """The world of one trajectory: an instance is made for each, from `environment.settings`, in a worker process.

    Of these methods a class needs `tools` or `step`; any may be async. One that raises, or takes longer than
    `environment.timeout_s`, fails only this trajectory.
    """

    def reset(self, prompt: Prompt, seed: int) -> str | None:
        """Begins; the text, if any, is added to the prompt. Trajectories of a group have the same seed."""

    tools: Sequence[Callable[..., Any]]
    """Plain functions with annotations and a docstring. A turn that calls some is answered by their results, one
    that calls none is the last. An error of a call is an answer, too, except for `EnvironmentFailed`."""

    def step(self, text: str) -> tuple[str, float | None, bool] | Awaitable[tuple[str, float | None, bool]]:
        """In place of `tools`: (the environment's answer to the turn `text`, its reward if it has one, whether the
        trajectory is over)."""

    def reward(self) -> float:
        """Of the trajectory, once it is over. Without this method it is the sum over turns; without rewards of turns,
        the value that `reward:` of the config gives the last turn."""


class StepResult(NamedTuple):
    """The result of one turn."""

    messages: list[Message]
    reward: float | None
    done: bool


class EnvironmentFailed(Exception):
    """The environment failed, so the trajectory has no reward.

    `reason`: raised | timeout | died | not_finite | replay (it does not repeat itself after a process died).
    """

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


class EnvironmentNameError(ExpectedError, ValueError):
    """`environment.name` does not lead to an environment; the message gives the reason."""
