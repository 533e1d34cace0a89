"""The section `environment`: what answers a turn of the policy."""

from __future__ import annotations

from pydantic import Field, JsonValue

from .section import Count, Processes, Seconds, Section


class EnvironmentConfig(Section):
    name: str | None = Field(
        None, description="package.module:class of an environment; default: none, a response is one turn"
    )
    agent: str | None = Field(
        None,
        description="package.module:function(url, api_key, task) -> reward, in place of an environment: it asks for "
        "turns over HTTP, as of a server of OpenAI or Anthropic",
    )
    host: str = Field("127.0.0.1", description="address of this machine at which agents reach the policy")
    settings: dict[str, JsonValue] = Field(
        default_factory=dict, description="arguments of the class, or further ones of the agent"
    )
    max_turns: Count = Field(8, description="turns of the policy; a longer trajectory ends there (max_turns)")
    max_turn_tokens: Count | None = Field(
        None, description="of one turn of the policy; default: what rollout.max_response_tokens leaves"
    )
    timeout_s: Seconds = Field(
        60.0, description="a call of the environment, or the whole of an agent, that takes longer fails its trajectory"
    )
    trajectory_timeout_s: Seconds | None = Field(
        None,
        description="a trajectory that takes longer in all, with what the policy samples, fails; default: no limit but "
        "those of its turns",
    )
    workers: Processes = Field(32, description="trajectories at a time, each in a process of its own")

    @property
    def source(self) -> str | None:
        """What is imported; None: a response is one turn."""
        return self.name or self.agent

    @property
    def setting(self) -> str:
        """The name of the setting that says so."""
        return "environment.name" if self.agent is None else "environment.agent"

    @property
    def described(self) -> str:
        return f"{self.setting} = {self.source}"
