"""Define the interface of environments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, NotRequired, Protocol

from typing_extensions import TypedDict

from dppo_megatron.errors import ExpectedError
from dppo_megatron.types import Prompt

CALL_ERROR = "error: "  # the answer to a call that raised begins with it


class Message(TypedDict):
    """Represents a message in the form that chat templates expect."""

    role: str
    content: str
    tool_call_id: NotRequired[str]
    name: NotRequired[str]  # of the tool


class Environment(Protocol):
    """Simulates the world of one trajectory. A worker process creates an instance for each, from
    `environment.settings`.

    A class needs `tools` or `step`; any method may be async. If a method raises, or takes longer than
    `environment.timeout_s`, only this trajectory fails.
    """

    def reset(self, prompt: Prompt, seed: int) -> str | None:
        """Begin the trajectory. A returned text is added to the prompt. Trajectories of a group have the same seed."""

    tools: Sequence[Callable[..., Any]]
    """Plain functions with annotations and a docstring. A turn that calls some is answered by their results, one
    that calls none is the last. An error of a call is an answer, too, except for `EnvironmentFailed`."""

    def step(self, text: str) -> tuple[str, float | None, bool] | Awaitable[tuple[str, float | None, bool]]:
        """Answer the turn `text`. An environment has `step` or `tools`.

        Returns the answer, the reward of the turn if there is one, and whether the trajectory is over.
        """

    def reward(self) -> float:
        """Return the reward of the trajectory, once it is over.

        Without this method the reward is the sum of the turns' rewards. If turns have no rewards either, `reward:` of
        the config scores the last turn.
        """


class StepResult(NamedTuple):
    """Contains the result of one turn."""

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
