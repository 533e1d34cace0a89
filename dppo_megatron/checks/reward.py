"""Rules of `reward`: every name leads to a function, whose module can be imported, with the settings it takes."""

from __future__ import annotations

from dppo_megatron.config import Config


def problems(config: Config) -> list[str]:
    """Imports the user's modules, at first in a process of their own: what ends it would end this one."""
    from dppo_megatron.rewards import RewardError, build_rewards, import_problem

    if not config.samples:
        return []
    named = {"": config.reward}
    named |= {f"eval.sets.{name}: ": chosen.reward for name, chosen in config.eval.sets.items() if chosen.reward}
    out = []
    for prefix, reward in named.items():
        problem = import_problem(reward)
        if problem is None:
            try:
                build_rewards(reward)
            except RewardError as error:
                problem = str(error)
        if problem is not None:
            out.append(prefix + problem)
    return out
