"""Rules of `environment`: its name leads to a class of which an environment can be made."""

from __future__ import annotations

from dppo_megatron.config import Config
from dppo_megatron.config.environment import EnvironmentConfig


def problems(config: Config) -> list[str]:
    """Makes one in a process of its own."""
    from dppo_megatron.environments.worker import environment_problem

    if config.environment.name is None and config.environment != EnvironmentConfig():
        return ["environment.name = null: without it the section has no effect; set it, or remove the other settings"]
    if config.environment.name is None or not config.samples:
        return []
    out = []
    if config.data.chat_template and config.data.overlong == "truncate":
        out.append(
            "data.overlong = truncate: an environment goes on from the whole prompt, which a chat template writes anew "
            "for every turn; use refuse or drop"
        )
    problem = environment_problem(config.environment, chat=config.data.chat_template)
    return [*out, problem] if problem else out
