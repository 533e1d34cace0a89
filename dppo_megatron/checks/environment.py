"""Rules of `environment`: its name leads to a class of which an environment can be made, or to an agent."""

from __future__ import annotations

from typing import Any

from dppo_megatron.config import Config
from dppo_megatron.config.task import EnvironmentConfig


def problems(config: Config, tools: list[dict[str, Any]]) -> list[str]:
    """Make one in a process of its own. Adds its tools, as chat templates take them, to `tools`."""
    from dppo_megatron.environments.worker import environment_problem

    environment, data = config.environment, config.data
    if environment.source is None and environment != EnvironmentConfig():
        return [
            "environment.name = null: without it or environment.agent the section has no effect; set one, or remove "
            "the other settings"
        ]
    if environment.source is None or not config.samples:
        return []
    if environment.name is not None and environment.agent is not None:
        return [
            f"environment.agent = {environment.agent}: environment.name is {environment.name}, and a trajectory is of "
            "one of them; remove the other"
        ]
    out = []
    if environment.agent is None and environment.host != EnvironmentConfig().host:
        out.append(f"environment.host = {environment.host}: for agents, and environment.agent names none; remove it")
    if environment.agent is not None and not data.chat_template:
        out.append(
            f"environment.agent = {environment.agent}: what it says are messages, which a chat template writes; set "
            "data.chat_template = true"
        )
    if environment.agent is None and data.chat_template and data.overlong == "truncate":
        out.append(
            "data.overlong = truncate: an environment goes on from the whole prompt, which a chat template writes anew "
            "for every turn; use refuse or drop"
        )
    by_turn = config.objective.credit == "turn"
    problem = environment_problem(environment, tools, chat=data.chat_template, by_turn=by_turn)
    return [*out, problem] if problem else out
