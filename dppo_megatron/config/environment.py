"""The section `environment`: what answers a turn of the policy."""

from __future__ import annotations

from pydantic import Field, JsonValue

from .section import Count, Processes, Seconds, Section


class EnvironmentConfig(Section):
    name: str | None = Field(
        None, description="package.module:class of an environment; default: none, a response is one turn"
    )
    settings: dict[str, JsonValue] = Field(default_factory=dict, description="arguments of the class")
    max_turns: Count = Field(8, description="turns of the policy; a trajectory that is not over by then is truncated")
    max_turn_tokens: Count | None = Field(
        None, description="of one turn of the policy; default: what rollout.max_response_tokens leaves"
    )
    timeout_s: Seconds = Field(60.0, description="a call of the environment that takes longer fails its trajectory")
    workers: Processes = Field(32, description="trajectories at a time, each in a process of its own")
