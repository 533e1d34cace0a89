"""Rule of `reward.name`: it leads to a function."""

from __future__ import annotations

from dppo_megatron.config import Config


def problems(config: Config) -> list[str]:
    """Imports the user's module."""
    from dppo_megatron.rewards import RewardError, build_reward

    if not config.samples:
        return []
    try:
        build_reward(config.reward)
    except RewardError as error:
        return [str(error)]
    return []
