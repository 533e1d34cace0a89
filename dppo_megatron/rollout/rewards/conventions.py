"""Adapt unmodified reward functions of other trainers, recognized by their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from dppo_megatron.errors import ExpectedError, shown
from dppo_megatron.types import Prompt

from .interface import NOT_APPLICABLE, Reward

_VERL = {"data_source", "solution_str", "ground_truth", "extra_info"}
_TRL = {"completions"}
_ABSENT = {"completion_ids", "completions_ids", "trainer_state", "environments"}  # TRL also passes these
# Names, or words in names, with which a first parameter cannot mean the prompt, or a second the response.
_LISTS = {"data_sources", "ground_truths", "prompts", "responses", "solution_strs"}  # of several samples
_MISPLACED = (_LISTS | {"args", "text"}, _LISTS | {"answer", "prompt", "question", "row", "solution"})
_RIGHT = {"correct", "expected", "gold", "gt", "label", "reference", "target", "true", "truth"}
_GIVEN = {"answer", "completion", "generation", "hypothesis", "output", "pred", "prediction", "response", "solution"}
_WORDS = (_RIGHT | _GIVEN, _RIGHT)


class RewardError(ExpectedError, ValueError):
    """`reward.name` does not name a reward; the message names the nearest valid one."""


def adapt(function: Callable[..., Any], name: str) -> Reward:
    """Return `function`, or an adapter if `function` follows the verl or TRL convention.

    verl: `compute_score(data_source, solution_str, ground_truth, extra_info)`, or some of these parameters. It returns
    a number, a dict with `score`, or a sequence that begins with the number.
    TRL: `f(prompts, completions, **columns)` is called with one sample. It returns a list of numbers, with None for a
    sample that it does not score.

    Either may be async. Arguments that a partial or `reward.settings` bind keep their values. Other functions are
    called with prompt and response. Raises `RewardError` if parameter names have another meaning, or name values that
    are not passed.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # code without a signature
        return function
    takes_all, bound = any(p.kind is p.VAR_KEYWORD for p in parameters.values()), getattr(function, "keywords", {})
    positional = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    verl_names, trl = parameters.keys() & _VERL, parameters.keys() >= _TRL
    verl = (verl_names and verl_names == set(positional)) or (
        len(verl_names) > 1 and not {"prompt", "response_text"} & set(positional)
    )
    needed = {
        n for n, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    if absent := sorted(needed - _VERL if verl else needed & (_ABSENT if trl else {*positional[2:]})):
        raise RewardError(f"reward.name = {name}: {', '.join(absent)}: not passed here; give it a default or remove it")
    if verl or trl:
        converters = (_verl_arguments, _verl_value) if verl else (_trl_arguments, _trl_value)
        return _Foreign(function, lambda n: n not in bound and (takes_all or n in parameters), needed, *converters)
    for parameter, meaning, names, words in zip(positional, ("prompt", "response"), _MISPLACED, _WORDS, strict=False):
        if parameter in names or words & {*parameter.split("_")}:
            raise RewardError(
                f"reward.name = {name}: the {meaning} would be passed as parameter {parameter}; name the parameters "
                "(prompt, response_text), where prompt.answer is the row's answer, or as verl or TRL does"
            )
    return function


class _Foreign:
    def __init__(
        self,
        function: Callable[..., Any],
        takes: Callable[[str], bool],  # whether it takes an argument of this name
        needed: set[str],
        arguments: Callable[[Prompt, str], dict[str, Any]],
        value: Callable[[Any], Any],
    ):
        self._function, self._arguments, self._value = function, arguments, value
        self._takes, self._needed = takes, needed
        self.trusted = getattr(function, "trusted", False)
        if hasattr(function, "check_answer"):
            self.check_answer = function.check_answer

    def __call__(self, prompt: Prompt, response_text: str) -> Any:
        arguments = self._arguments(prompt, response_text)
        if missing := self._needed - arguments.keys():
            raise TypeError(f"the row has no column {', '.join(sorted(missing))}, which it takes")
        returned = self._function(**{name: value for name, value in arguments.items() if self._takes(name)})
        return self._awaited(returned) if inspect.isawaitable(returned) else self._value(returned)

    async def _awaited(self, returned: Awaitable[Any]) -> Any:
        return self._value(await returned)


def _verl_arguments(prompt: Prompt, text: str) -> dict[str, Any]:
    return {
        "data_source": prompt.source,
        "solution_str": text,
        "ground_truth": prompt.answer,
        "extra_info": prompt.columns.get("extra_info") or {},
    }


def _verl_value(returned: Any) -> Any:
    if isinstance(returned, dict):
        return returned.get("score")
    return returned[0] if isinstance(returned, (tuple, list)) else returned


def _trl_arguments(prompt: Prompt, text: str) -> dict[str, Any]:
    row_prompt = prompt.columns.get("prompt", prompt.text)
    completion = text if isinstance(row_prompt, str) else [{"role": "assistant", "content": text}]
    columns = {name: [value] for name, value in prompt.columns.items() if name not in ("prompt", "completion")}
    logs = dict.fromkeys(("log_extra", "log_metric"), lambda *_, **__: None)
    return {**columns, **logs, "prompts": [row_prompt], "completions": [completion]}


def _trl_value(returned: Any) -> Any:
    try:
        (value,) = returned
    except (TypeError, ValueError):
        raise TypeError(f"it returned {shown(returned)}, expected a list of one number for one completion") from None
    return NOT_APPLICABLE if value is None else value
