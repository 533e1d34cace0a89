"""Rules of `environment`: its name leads to a class of which an environment can be made."""

from __future__ import annotations

from dppo_megatron.config import Config
from dppo_megatron.config.environment import EnvironmentConfig


def problems(config: Config) -> list[str]:
    """Makes one in a process of its own."""
    from dppo_megatron.environments.worker import environment_problem

    if config.environment.name is None and config.environment != EnvironmentConfig():
        return ["environment.name = null: without it the section has no effect; set it, or remove the other settings"]
    problem = environment_problem(config.environment) if config.samples else None
    return [problem] if problem else []
