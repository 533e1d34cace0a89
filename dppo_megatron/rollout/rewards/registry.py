"""Find the callable for a name in the config."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dppo_megatron.common import working_directory
from dppo_megatron.errors import ExpectedError, did_you_mean, with_module

from .conventions import RewardError, adapt
from .interface import GroupReward, Reward
from .outcome import describe, place

if TYPE_CHECKING:
    from dppo_megatron.config.schema import RewardConfig

BUILTIN = {
    "arithmetic": "dppo_megatron.rollout.rewards.arithmetic:arithmetic",
    "gsm8k": "dppo_megatron.rollout.rewards.gsm8k:gsm8k",
    "dapo": "dppo_megatron.rollout.rewards.dapo:Dapo",
    "exact": "dppo_megatron.rollout.rewards.texts:ExactMatch",
    "http": "dppo_megatron.rollout.rewards.remote:RemoteReward",
    "math": "dppo_megatron.rollout.rewards.mathematics:Math",
    "multiple_choice": "dppo_megatron.rollout.rewards.texts:MultipleChoice",
    "regex": "dppo_megatron.rollout.rewards.texts:Regex",
}
# (smallest, largest) reward; unknown for user code.
_RANGES = dict.fromkeys(BUILTIN, (0.0, 1.0)) | {"http": (-math.inf, math.inf), "dapo": (-math.inf, 1.0)}
_ABSENT = object()
_LINE = "Correct that line; its imports must be installed or on PYTHONPATH"


def build_rewards(config: RewardConfig) -> list[Reward | GroupReward]:
    """Load the reward for each term in `config`, in order. Raises `RewardError`."""
    return [load_reward(term.name, term.settings) for term in config.all_terms]


def reward_range(config: RewardConfig) -> tuple[float, float]:
    """Return (smallest, largest) possible reward over all rows; infinite where unknown."""
    sources = {None, *(source for term in config.all_terms for source in term.sources)}
    applying = [[t for t in config.all_terms if t.weight and source in (t.sources or sources)] for source in sources]
    ends = [[[t.weight * end for end in _RANGES.get(t.name, _RANGES["http"])] for t in terms] for terms in applying]
    return min(sum(map(min, term_ends)) for term_ends in ends), max(sum(map(max, term_ends)) for term_ends in ends)


def load_reward(name: str, settings: Mapping[str, Any] | None = None) -> Reward | GroupReward:
    """Return a built-in reward, or the callable `package.module:attribute`. A class is instantiated.

    `settings` are the class arguments, or additional arguments for every function call. Functions that follow the verl
    or TRL convention are adapted. Modules are found on the Python path and in the working directory. Raises
    `RewardError`.
    """
    if name not in BUILTIN and ":" not in name:
        hint = did_you_mean(name, BUILTIN, f"built in are {', '.join(BUILTIN)}.")
        hint = with_module(name) or f"{hint} For your own, write package.module:function"
        raise RewardError(f"reward.name = {name}: unknown; {hint}")
    path = BUILTIN.get(name, name)
    reward = load_attribute("reward.name", path, RewardError, shown_as=name)
    if isinstance(reward, type):
        factory = functools.partial(reward, **(settings or {}))
        problem = f"reward.name = {name}: {path.partition(':')[2]}() failed"
        reward = _foreign(problem, factory, "reward.settings are its arguments", RewardError)
    elif settings:
        if reason := rejected_arguments(reward, **settings):
            raise RewardError(f"reward.settings: {name} does not accept them: {reason}; correct them")
        bound: Any = functools.partial(reward, **settings)
        if hasattr(reward, "check_answer"):
            bound.check_answer = reward.check_answer
        reward = bound
    if isinstance(reward, GroupReward):
        return reward
    if not callable(reward):
        raise RewardError(f"reward.name = {name}: {type(reward).__name__} is not callable; name a function")
    return adapt(reward, name)


def rejected_arguments(function: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    """Return why a call with these arguments fails, or "". With only `settings`, other arguments may be missing."""
    try:
        signature = inspect.signature(function)
        (signature.bind if arguments else signature.bind_partial)(*arguments, **settings)
    except TypeError as error:
        return str(error)
    except ValueError:  # code without a signature
        pass
    return ""


def load_attribute(setting: str, path: str, error: type[ExpectedError], shown_as: str | None = None) -> Any:
    """Return the object named `package.module:attribute`, from the Python path or the working directory.

    Raises `error` with a message that begins with `setting`, and with the nearest names that exist.
    """
    module_name, _, attribute = path.partition(":")
    assignment = f"{setting} = {shown_as or path}"
    if ":" not in path:
        raise error(f"{assignment}: no module; {with_module(path) or 'write package.module:attribute'}")
    working_directory.put_on_path()
    problem = f"{assignment}: cannot import {module_name}"
    remedy = f"Add its directory to PYTHONPATH, start in the directory that contains it, or correct {setting}"
    if (file := Path(module_name)).suffix == ".py":
        remedy = f"Drop .py, as in an import: {module_name[:-3].replace('/', '.')}:{attribute}"
        if file.is_absolute():
            remedy = f"Add {file.parent} to PYTHONPATH, and write {file.stem}:{attribute}"
    module = _foreign(problem, lambda: importlib.import_module(module_name), remedy, error, _LINE)
    problem = f"{assignment}: cannot look up {attribute!r}"
    obj = _foreign(problem, lambda: getattr(module, attribute, _ABSENT), remedy, error, _LINE)
    if obj is _ABSENT:
        public_names = (name for name in dir(module) if not name.startswith("_"))
        hint = did_you_mean(attribute, public_names, "check the spelling")
        raise error(f"{assignment}: module {module_name} has no {attribute!r}; {hint}")
    return obj


def _foreign(
    problem: str, call: Callable[[], Any], remedy: str, error_type: type[ExpectedError], line_remedy: str = ""
) -> Any:
    """Call user code and return the result. Raise `error_type` for any error there, including sys.exit.

    `line_remedy` is the remedy if a line in user code raised.
    """
    try:
        return call()
    except BaseException as error:
        # Only an Exception may be the cause; a traceback prints it for the author.
        cause = error if isinstance(error, Exception) else None
        location = place(error)
        if isinstance(error, ModuleNotFoundError) and not location:
            package = (error.name or "").partition(".")[0]
            if f"import {package}" not in problem:  # a module of this package imports it
                remedy = f"pip install {package.replace('_', '-')}"
        raise error_type(f"{problem}: {describe(error)}{location}. {(location and line_remedy) or remedy}") from cause
