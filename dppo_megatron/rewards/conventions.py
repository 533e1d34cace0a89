"""Adapt unmodified reward functions of other trainers, recognised by their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from dppo_megatron.errors import ExpectedError
from dppo_megatron.types import Prompt

from .interface import NOT_APPLICABLE, Reward

_VERL = {"data_source", "solution_str", "ground_truth", "extra_info"}
_TRL = {"completions"}
# verl and TRL also pass these; here they do not exist.
_ABSENT = {"completion_ids", "completions_ids", "trainer_state", "environments", "reward_model_tokenizer"}
# First parameters with these names would not mean the prompt; second ones would not mean the response.
_ANSWERS = {"answer", "expected", "gold", "ground_truth", "label", "reference", "solution", "target"}
_RESPONSES = {"completion", "generation", "output", "pred", "prediction", "response", "response_text", "solution_str"}
_LISTS = {"data_sources", "ground_truths", "prompts", "responses", "solution_strs"}  # of several samples
_MISPLACED = (_ANSWERS | _RESPONSES | _LISTS | {"text"}, _ANSWERS | _LISTS | {"prompt", "question", "row"})


class RewardError(ExpectedError, ValueError):
    """`reward.name` does not name a reward; the message names the nearest valid one."""


def adapt(function: Callable[..., Any], name: str) -> Reward:
    """Return `function` itself, or an adapter for the convention of verl or TRL.

    verl: `compute_score(data_source, solution_str, ground_truth, extra_info)`, or with some of these parameters. It
    returns a number, a dict with `score`, or a sequence that begins with the number. TRL:
    `f(prompts, completions, **columns)` returns a list of numbers, None for a sample to which it does not apply; it is
    called with one sample. Either may be async. Other functions are called with prompt and response. Raises
    `RewardError` if parameter names have another meaning, or name values that are not passed.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # code without a signature
        return function
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if absent := [n for n, p in parameters.items() if n in _ABSENT and p.default is p.empty]:
        raise RewardError(f"reward.name = {name}: {', '.join(absent)}: not passed here; give it a default or remove it")
    known = parameters.keys() & _VERL
    if (known and known == set(named)) or (len(known) > 1 and not {"prompt", "response_text"} & set(named)):
        return _Foreign(function, None if takes_all else set(parameters), _verl_arguments, _verl_value)
    if parameters.keys() >= _TRL:
        return _Foreign(function, None if takes_all else set(parameters), _trl_arguments, _trl_value)
    for parameter, meaning, others in zip(named, ("prompt", "response"), _MISPLACED, strict=False):
        if parameter in others:
            raise RewardError(
                f"reward.name = {name}: the {meaning} would be passed as parameter {parameter}; name the parameters "
                "(prompt, response_text), where prompt.answer is the row's answer, or as verl or TRL does"
            )
    return function


class _Foreign:
    def __init__(
        self,
        function: Callable[..., Any],
        names: set[str] | None,  # parameter names of the function; None = it takes any
        arguments: Callable[[Prompt, str], dict[str, Any]],
        value: Callable[[Any], Any],
    ):
        self._function, self._names, self._arguments, self._value = function, names, arguments, value
        self.trusted = getattr(function, "trusted", False)
        if hasattr(function, "check_answer"):
            self.check_answer = function.check_answer

    def __call__(self, prompt: Prompt, response_text: str) -> Any:
        arguments = self._arguments(prompt, response_text)
        returned = self._function(**{k: v for k, v in arguments.items() if self._names is None or k in self._names})
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
    asked = prompt.columns.get("prompt", prompt.text)
    completion = text if isinstance(asked, str) else [{"role": "assistant", "content": text}]
    columns = {name: [value] for name, value in prompt.columns.items() if name not in ("prompt", "completion")}
    logs = dict.fromkeys(("log_extra", "log_metric"), lambda *_, **__: None)
    return {**columns, **logs, "prompts": [asked], "completions": [completion]}


def _trl_value(returned: Any) -> Any:
    if len(returned) != 1:
        raise ValueError(f"it returned {len(returned)} values for one completion")
    return NOT_APPLICABLE if returned[0] is None else returned[0]
