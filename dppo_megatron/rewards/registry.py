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
from dppo_megatron.errors import ExpectedError, did_you_mean

from .conventions import RewardError, adapt
from .interface import GroupReward, Reward
from .outcome import describe, place

if TYPE_CHECKING:
    from dppo_megatron.config.schema import RewardConfig

BUILTIN = {
    "arithmetic": "dppo_megatron.rewards.arithmetic:arithmetic",
    "gsm8k": "dppo_megatron.rewards.gsm8k:gsm8k",
    "dapo": "dppo_megatron.rewards.dapo:Dapo",
    "exact": "dppo_megatron.rewards.texts:ExactMatch",
    "http": "dppo_megatron.rewards.remote:RemoteReward",
    "math": "dppo_megatron.rewards.mathematics:Math",
    "multiple_choice": "dppo_megatron.rewards.texts:MultipleChoice",
    "regex": "dppo_megatron.rewards.texts:Regex",
}
# The smallest and the largest reward; those of users' code are not known.
_RANGES = dict.fromkeys(BUILTIN, (0.0, 1.0)) | {"http": (-math.inf, math.inf), "dapo": (-math.inf, 1.0)}
_ABSENT = object()
_LINE = "Correct that line; its imports must be installed or on PYTHONPATH"


def build_rewards(config: RewardConfig) -> list[Reward | GroupReward]:
    """Return the rewards of the terms of `config`, in order. Raises `RewardError`."""
    return [load_reward(term.name, term.settings) for term in config.all_terms]


def reward_range(config: RewardConfig) -> tuple[float, float]:
    """Return the smallest and the largest reward of a response to any row, infinite where they are not known."""
    sources = {None, *(source for term in config.all_terms for source in term.sources)}
    applying = [[t for t in config.all_terms if t.weight and source in (t.sources or sources)] for source in sources]
    ends = [[[t.weight * end for end in _RANGES.get(t.name, _RANGES["http"])] for t in terms] for terms in applying]
    return min(sum(map(min, each)) for each in ends), max(sum(map(max, each)) for each in ends)


def load_reward(name: str, settings: Mapping[str, Any] | None = None) -> Reward | GroupReward:
    """Return a built-in reward, or the callable `package.module:attribute`. A class is instantiated.

    `settings` are the arguments of the class, or additional arguments of every call of the function. Functions of
    verl's and TRL's conventions are adapted. Modules are found on the Python path and in the working directory. Raises
    `RewardError`.
    """
    if name not in BUILTIN and ":" not in name:
        hint = did_you_mean(name, BUILTIN, f"built in are {', '.join(BUILTIN)}.")
        raise RewardError(f"reward.name = {name}: unknown; {hint} For your own, write package.module:function")
    path = BUILTIN.get(name, name)
    reward = load_attribute("reward.name", path, RewardError, shown_as=name)
    if isinstance(reward, type):
        made = functools.partial(reward, **(settings or {}))
        what = f"reward.name = {name}: {path.partition(':')[2]}() failed"
        reward = _foreign(what, made, "reward.settings are its arguments", RewardError)
    elif settings:
        try:
            inspect.signature(reward).bind_partial(**settings)
        except TypeError as error:
            raise RewardError(f"reward.settings: {name} does not accept them: {error}; correct them") from None
        except ValueError:
            pass  # code without a signature
        bound: Any = functools.partial(reward, **settings)
        if hasattr(reward, "check_answer"):
            bound.check_answer = reward.check_answer
        reward = bound
    if isinstance(reward, GroupReward):
        return reward
    if not callable(reward):
        raise RewardError(f"reward.name = {name}: {type(reward).__name__} is not callable; name a function")
    return adapt(reward, name)


def load_attribute(setting: str, path: str, error: type[ExpectedError], shown_as: str | None = None) -> Any:
    """Return the object named `package.module:attribute`, from the Python path or the working directory.

    Raises `error`, which begins with `setting` and the nearest names that exist.
    """
    module_name, _, attribute = path.partition(":")
    named = f"{setting} = {shown_as or path}"
    working_directory.put_on_path()
    what = f"{named}: cannot import {module_name}"
    where = f"Add its directory to PYTHONPATH, start in the directory that contains it, or correct {setting}"
    if (file := Path(module_name)).suffix == ".py":
        where = f"Drop .py, as in an import: {module_name[:-3].replace('/', '.')}:{attribute}"
        if file.is_absolute():
            where = f"Add {file.parent} to PYTHONPATH, and write {file.stem}:{attribute}"
    module = _foreign(what, lambda: importlib.import_module(module_name), where, error, _LINE)
    what = f"{named}: cannot look up {attribute!r}"
    found = _foreign(what, lambda: getattr(module, attribute, _ABSENT), where, error, _LINE)
    if found is _ABSENT:
        public = (name for name in dir(module) if not name.startswith("_"))
        hint = did_you_mean(attribute, public, "check the spelling")
        raise error(f"{named}: module {module_name} has no {attribute!r}; {hint}")
    return found


def _foreign(what: str, call: Callable[[], Any], remedy: str, raised: type[ExpectedError], of_line: str = "") -> Any:
    """Return the result of the user's code. Raise `raised` for any error of that code, including sys.exit.

    `of_line` is the remedy if a line of the user's code raised.
    """
    try:
        return call()
    except BaseException as error:
        # Only an Exception may be the cause, which a traceback prints for the author of the code.
        cause = error if isinstance(error, Exception) else None
        at = place(error)
        if isinstance(error, ModuleNotFoundError) and not at:
            package = (error.name or "").partition(".")[0]
            if f"import {package}" not in what:  # a module of this package imports it
                remedy = f"pip install {package.replace('_', '-')}"
        raise raised(f"{what}: {describe(error)}{at}. {(at and of_line) or remedy}") from cause
