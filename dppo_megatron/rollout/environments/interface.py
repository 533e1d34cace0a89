"""Define the interface of environments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, NotRequired, Protocol

from typing_extensions import TypedDict

from dppo_megatron.errors import ExpectedError
from dppo_megatron.types import Prompt

CALL_ERROR = "error: "  # prefix of the answer to a call that raised


class Message(TypedDict):
    """Represents a message in the form that chat templates expect."""

    role: str
    content: str
    tool_call_id: NotRequired[str]
    name: NotRequired[str]  # tool name


class Environment(Protocol):
    """Simulates the world of one trajectory.

    A worker process creates an instance for each trajectory, from `environment.settings`. A class needs `tools` or
    `step`; any method may be async. If a method raises, or takes longer than `environment.timeout_s`, only this
    trajectory fails.
    """

    def reset(self, prompt: Prompt, seed: int) -> str | None:
        """Begin the trajectory. A returned text is added to the prompt. Trajectories of a group have the same seed."""

    tools: Sequence[Callable[..., Any]]
    """Plain functions with annotations and a docstring. If a turn calls functions, their results answer the turn; a
    turn without calls is the last. A call error is an answer, too, except for `EnvironmentFailed`."""

    def step(self, text: str) -> tuple[str, float | None, bool] | Awaitable[tuple[str, float | None, bool]]:
        """Answer the turn `text`; return (answer, turn reward or None, whether the trajectory is over)."""

    def reward(self) -> float:
        """Return the trajectory reward, after the last turn.

        Without this method, the turn rewards are added up. If turns have no rewards either, `reward:` in the config
        scores the last turn.
        """


class StepResult(NamedTuple):
    """Contains the result of a turn."""

    messages: list[Message]
    reward: float | None
    done: bool


class EnvironmentFailed(Exception):
    """The environment failed, so the trajectory has no reward.

    `reason` is raised, timeout, died, not_finite, or replay (different answers when repeated after a process died).
    """

    def __init__(self, reason: str, detail: str):
        super().__init__(reason, detail)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[1])


class EnvironmentNameError(ExpectedError, ValueError):
    """`environment.name` does not name an environment; the message gives the reason."""
