"""Describe plain functions as tools for a chat template, and call them as the policy's text requests."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCall(NamedTuple):
    """Describes a tool call in a policy's turn. `problem` states why the call is invalid, "" if it is valid."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""


def tool_calls(text: str) -> list[ToolCall]:
    """Return the calls in a turn.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen), or the whole turn is `{"name":
    ..., "parameters": {...}}` (Llama).
    """
    if found := _HERMES.findall(text):
        return [_parse(part) for part in found]
    whole = text.strip().removeprefix("<|python_tag|>")
    call = _parse(whole) if whole.startswith("{") else None
    return [] if call is None or call.problem else [call]


def parse_turn(text: str, offered: bool) -> tuple[str, str, tuple[ToolCall, ...]]:
    """Return (reasoning, content, calls) of a turn. Text that is not a call stays content.

    `offered` states whether the policy has tools.
    """
    reasoning, thought, rest = text.partition("</think>")
    if not thought:
        reasoning, rest = "", text
    calls = tool_calls(rest) if offered else []
    if any(call.problem for call in calls):
        calls = []
    content = rest
    if calls:
        content = _HERMES.sub("", rest) if _HERMES.search(rest) else ""
    return reasoning.strip().removeprefix("<think>").strip(), content.strip(), tuple(calls)


def _parse(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"not JSON: {error}")
    match call:
        case {"name": str(name), "arguments": dict(arguments)} | {"name": str(name), "parameters": dict(arguments)}:
            return ToolCall(name, arguments)
    return ToolCall("", {}, "expected an object with name and arguments")


class Tools:
    """Stores functions by name, with JSON schemas of their arguments.

    Raises `TypeError` for a function that a call in JSON cannot reach: without a name of its own, or with an argument
    without a name or a type. Raises pydantic's error for a type without a JSON schema.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]):
        names = [getattr(function, "__name__", "") for function in functions]
        for name, function in zip(names, functions, strict=True):
            if not re.fullmatch(r"[\w.-]{1,64}", name) or names.count(name) > 1:
                raise TypeError(f"tools: {name or function} is not the name of one function; write a def for each")
            for argument in inspect.signature(function).parameters.values():
                unnamed = argument.kind in (argument.POSITIONAL_ONLY, argument.VAR_POSITIONAL)
                if unnamed or (argument.annotation is argument.empty and argument.kind is not argument.VAR_KEYWORD):
                    raise TypeError(f"tools: {name}({argument}): a call needs name and type; write it as (city: str)")
        # pydantic's annotation lacks functions, which it documents.
        self._functions = {f.__name__: TypeAdapter(f) for f in functions}  # type: ignore[arg-type]
        self.schemas = [
            {
                "type": "function",
                "function": {
                    "name": function.__name__,
                    "description": inspect.getdoc(function) or "",
                    "parameters": self._functions[function.__name__].json_schema(),
                },
            }
            for function in functions
        ]

    def call(self, call: ToolCall) -> Any:
        """Return the function's result. Raises its errors, and `ValueError` with the problem of the call."""
        if call.problem:
            raise ValueError(call.problem)
        function = self._functions.get(call.name)
        if function is None:
            raise ValueError(f"no tool {call.name!r}; there are {', '.join(self._functions)}")
        try:
            return function.validate_python(ArgsKwargs((), call.arguments))
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ValueError("; ".join(problems)) from None
