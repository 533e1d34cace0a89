"""Describe a trajectory before, during and after it is played."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from dppo_megatron.bank.journal import FinishedTurns
from dppo_megatron.rollout.engines.protocol import GenerateRequest
from dppo_megatron.rollout.rewards import RewardPool
from dppo_megatron.types import Prompt, Rollout

from .conversation import Conversation
from .dialogue import Dialogue, Piece


@dataclass(frozen=True)
class TrajectoryRequest:
    """Describes a trajectory in a group.

    first: request for the first turn. The request id is unique among running trajectories, and max_tokens limits all
        tokens after the prompt.
    turns: turns that were finished before.
    order: group number, in the order in which groups began.
    recorded: whether the metrics include the trajectory.
    """

    prompt: Prompt
    first: GenerateRequest
    rewards: RewardPool
    turns: FinishedTurns
    order: int
    recorded: bool


@dataclass(frozen=True)
class Trajectory:
    """Contains a finished trajectory. `reward` is None if it failed. `turn_rewards` is empty if turns have none."""

    branches: list[list[Piece]]
    finish_reason: str
    reward: float | None
    turn_rewards: list[float]

    @property
    def sampled(self) -> list[Rollout]:
        """Return the policy turns."""
        pieces = (piece for branch in self.branches for piece in branch)
        return [piece.sampled for piece in pieces if piece.sampled is not None]


@dataclass
class Attempt:
    """Tracks a running trajectory. After a failure it keeps the turns so far."""

    dialogue: Dialogue | Conversation | None = None
    finish_reason: str = "abort"
    reward: float | None = None
    turn_rewards: list[float | None] = field(default_factory=list)

    @property
    def branches(self) -> list[list[Piece]]:
        return [] if self.dialogue is None else self.dialogue.finished()


class AgentGateway(Protocol):
    """Serves the policy to agents."""

    @property
    def url(self) -> str: ...

    def session(self, conversation: Conversation) -> AbstractAsyncContextManager[str]:
        """Yield the key for requests to the conversation."""
        ...
