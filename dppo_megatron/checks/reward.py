"""Rules of `reward`: every name leads to a function, whose module can be imported, with the settings it takes."""

from __future__ import annotations

from dppo_megatron.config import Config


def problems(config: Config) -> list[str]:
    """Imports the user's modules, at first in a process of their own: what ends it would end this one."""
    from dppo_megatron.rewards import RewardError, build_rewards, import_problem

    if not config.samples:
        return []
    if problem := import_problem(config.reward):
        return [problem]
    try:
        build_rewards(config.reward)
    except RewardError as error:
        return [str(error)]
    return []
