"""From the name in the config to the callable."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from dppo_megatron.common import working_directory
from dppo_megatron.errors import ExpectedError

from .interface import Reward

if TYPE_CHECKING:
    from dppo_megatron.config.schema import RewardConfig

BUILTIN = {
    "arithmetic": "dppo_megatron.rewards.arithmetic:arithmetic",
    "gsm8k": "dppo_megatron.rewards.gsm8k:gsm8k",
}


class RewardError(ExpectedError, ValueError):
    """`reward.name` does not lead to a reward; the message names the nearest valid one."""


def build_reward(config: RewardConfig) -> Reward:
    """The reward that `config.name` names. Raises `RewardError`."""
    return load_reward(config.name)


def load_reward(name: str) -> Reward:
    """A built-in name, or `package.module:attribute` of a callable; of a class, an instance.

    Modules are found on the Python path and in the working directory. Raises `RewardError`.
    """
    if name not in BUILTIN and ":" not in name:
        near = difflib.get_close_matches(name, BUILTIN, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"built in are {', '.join(BUILTIN)}."
        raise RewardError(f"reward.name = {name}: unknown; {hint} For your own, write package.module:function")
    module_name, _, attribute = BUILTIN.get(name, name).partition(":")
    module = _import(module_name, name)
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "check the spelling"
        raise RewardError(f"reward.name = {name}: module {module_name} has no {attribute!r}; {hint}")
    reward = getattr(module, attribute)
    if isinstance(reward, type):
        reward = reward()
    if not callable(reward):
        raise RewardError(f"reward.name = {name}: {type(reward).__name__} is not callable; name a function")
    return reward


def _import(module_name: str, name: str):
    working_directory.put_on_path()
    try:
        return importlib.import_module(module_name)
    # Importing runs the user's module, which can raise anything.
    except Exception as error:
        raise RewardError(
            f"reward.name = {name}: cannot import {module_name}: {type(error).__name__}: {error}. It must "
            "be on the Python path or in the working directory"
        ) from error
