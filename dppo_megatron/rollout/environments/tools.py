"""Describe plain functions as tools for a chat template, and call them as the policy's text requests."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

_THINK, _THOUGHT = ("<think>", "[THINK]"), ("</think>", "[/THINK]")
_CALL = ("<tool_call>", "[TOOL_CALLS]", "<｜tool▁call▁begin｜>", "<|tool_call_begin|>")
_END = ("</tool_call>", "<｜tool▁call▁end｜>", "<|tool_call_end|>")
_INSIDE = ("[CALL_ID]", "<｜tool▁sep｜>", "<|tool_call_argument_begin|>", "<|start|>", "<|channel|>", "<|message|>")
MARKS = (*_THINK, *_THOUGHT, *_CALL, *_END, *_INSIDE)
"""Marks that separate the parts of a turn. Some tokenizers make them special tokens."""
_LLAMA_CALL = (  # at the beginning of the shown text, because Llama's calls have no mark
    r'(?:\A|(?<=</think>|\[/THINK\]))\s*(?:<\|python_tag\|>\s*)?\{(?=\s*"(?:type|name|parameters)")'
    r'(?=.*"name"\s*:)(?=.*"(?:parameters|arguments)"\s*:)'
)
_SECTION = r"<｜tool▁calls▁(?:begin|end)｜>|<\|tool_calls_section_(?:begin|end)\|>"
_CALLS, _ENDS = ("|".join(map(re.escape, marks)) for marks in (_CALL, _END))
_MARK = re.compile(
    rf"(?P<think><think>|\[THINK\])|(?P<thought></think>|\[/THINK\])|(?P<call>{_CALLS}|{_LLAMA_CALL})|{_SECTION}",
    re.DOTALL,
)
# The formats in which chat templates write calls. Existing parsers do not fit: the vLLM and SGLang parsers take half a
# minute to import and drop a malformed call without a reason. The transformers parser needs a `response_template`, but
# models with these formats have none.
_JSON = re.compile(  # Hermes, Qwen2.5, Qwen3, Mistral, Llama 3; then with a name before: DeepSeek, Kimi, Mistral
    r"(?:<tool_call>|\[TOOL_CALLS\])\s*(?=[\[{])|\s*(?:<\|python_tag\|>\s*)?(?=\{)"
    r"|(?:\[TOOL_CALLS\]|<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?|<\|tool_call_begin\|>)\s*"
    r"(?=(?P<id>[\w.-]+:\d+)?)(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?(?:\[CALL_ID\](?P<call_id>\w+))?\s*"
    r"(?:(?:\[ARGS\]|<｜tool▁sep｜>|<\|tool_call_argument_begin\|>)\s*)?(?:```json\s*)?(?=\{)"
)
_AFTER_JSON = re.compile(rf"\s*(?:```\s*)?(?:{_ENDS}|(?=<tool_call>|\[TOOL_CALLS\]|<｜|<\|)|\Z)")
# Qwen3.5 and GLM write each argument between tags: text up to the arguments, an argument, text after them.
_FIRST = re.compile(r"<tool_call>\s*(?:<function=)?([\w.-]+)>?\s*(?=<)")
_ARGUMENT = re.compile(
    r"<(?:parameter=|arg_key>)([^<>]+)(?:>\n?|</arg_key>\s*<arg_value>)((?:(?!<tool_call>).)*?)"
    r"(?:\n?</parameter>|</arg_value>)\s*(?=<parameter=|<arg_key>|</function>|</tool_call>)",
    re.DOTALL,
)
_LAST = re.compile(r"</function>\s*(?:</tool_call>|\Z)|</tool_call>")
_MESSAGE = re.compile(  # gpt-oss: addressed to a tool, in a channel
    r"(?:\A|<\|start\|>assistant)(\s*(?:to=[\w.-]+\s*)?<\|channel\|>[^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>"
    r"(.*?)(?:<\|(?:end|call|return)\|>)?(?=<\|start\|>|\Z)",
    re.DOTALL,
)
Tool = dict[str, Any]  # an OpenAI chat tool: {"type": "function", "function": {name, description, parameters}}


class ToolCall(NamedTuple):
    """Describes a tool call in a policy turn. `problem` states why the call is invalid, "" if it is valid.

    `id` is "" if the policy wrote no id.
    """

    name: str
    arguments: dict[str, Any]
    problem: str = ""
    id: str = ""

    def named(self, turn: str, number: int) -> str:
        """Return the id, else nine letters and digits (Mistral's form) from the turn name and the call number."""
        return self.id or blake2b(f"{turn} {number}".encode(), digest_size=5).hexdigest()[:9]


def tool_calls(text: str, tools: Sequence[Tool] = ()) -> list[ToolCall]:
    """Return the calls in a turn, including malformed calls, but not the calls in the reasoning.

    docs/environments.md lists the formats. `tools` give the types of arguments that a format writes without quotes.
    """
    return turn_parts(text, True, tools)[2]


def opened_reasoning(prompt: str) -> str:
    """Return the mark with which a prompt opens the next turn's reasoning, else ""."""
    return next((mark for mark in _THINK if prompt.rstrip().endswith(mark)), "")


def turn_parts(text: str, offered: bool, tools: Sequence[Tool] = ()) -> tuple[str, str, list[ToolCall]]:
    """Split a turn into (reasoning, content, calls). Calls include malformed ones, whose text also stays content.

    `offered` states whether the policy has tools.
    """
    text = _MESSAGE.sub(_without_channels, text)
    parts: tuple[list[str], list[str]] = [], []  # content, reasoning
    calls: list[ToolCall] = []
    position, thinking = 0, False
    while mark := _MARK.search(text, position):
        parts[thinking].append(text[position : mark.start()])
        position = mark.end()
        if mark["thought"] and not thinking:  # the prompt opened the reasoning, or a quoted mark seemed to end it
            parts, calls = ([], [text[: mark.start()]]), []
        elif mark["think"] or mark["thought"]:
            thinking = bool(mark["think"])
        elif mark["call"]:
            new_calls, end = _read_call(text, mark.start(), tools) if offered and not thinking else ([], 0)
            calls += new_calls
            position = end or position
            parts[thinking].append("" if end else mark[0])
    parts[thinking].append(text[position:])
    content, reasoning = ("".join(part).strip() for part in parts)
    return reasoning, content, calls


def _without_channels(message: re.Match[str]) -> str:
    """Return a gpt-oss message with the marks of other models."""
    head, body = message.groups()
    if recipient := re.search(r"to=([\w.-]+)", head):
        return f"<|tool_call_begin|>{recipient[1]}<|tool_call_argument_begin|>{body}<|tool_call_end|>"
    return f"<think>{body}</think>" if "analysis" in head else body


def _read_call(text: str, start: int, tools: Sequence[Tool]) -> tuple[list[ToolCall], int]:
    """Return (calls that the mark at `start` opens, their end), with end 0 if a call is malformed."""
    if head := _JSON.match(text, start):
        name, id = head["name"] or "", head["id"] or head["call_id"] or ""
        try:
            value, size = json.JSONDecoder().raw_decode(text[head.end() :])
            if (end_match := _AFTER_JSON.match(text, head.end() + size)) is None:
                raise ValueError(f"text after its end: char {size}")
        except (ValueError, RecursionError) as error:
            return [ToolCall(name, {}, f"not JSON: {error}", id)], 0
        value = {"name": name, "arguments": value, "id": id} if name else value
        calls = [_checked(call) for call in (value if isinstance(value, list) else [value])]
        if any(call.problem for call in calls):  # without a mark, an answer may be JSON
            return calls if text.startswith(_CALL, start) else [], 0
        return calls, end_match.end()
    if head := _FIRST.match(text, start):
        schema: Any = next((t["function"]["parameters"] for t in tools if t["function"]["name"] == head[1]), {})
        end, arguments = head.end(), {}
        while part := _ARGUMENT.match(text, end):
            end, arguments[part[1].strip()] = part.end(), _typed(part[2], schema, part[1].strip())
        if end_match := _LAST.match(text, end):
            return [ToolCall(head[1], arguments)], end_match.end()
    return [_checked(None)], 0


def _checked(call: Any) -> ToolCall:
    match call:
        case {"name": str(name), "arguments": dict(arguments)} | {"name": str(name), "parameters": dict(arguments)}:
            return ToolCall(name, arguments, id=str(call.get("id") or ""))
    return ToolCall("", {}, "expected an object with name and arguments")


def _typed(raw: str, schema: Mapping[str, Any], name: str) -> Any:
    """Return an argument that was written without quotes: text if the tool takes text, else JSON."""
    try:
        argument_schema = schema.get("properties", {}).get(name, {})
        types = json.dumps([choice.get("type") for choice in (argument_schema, *argument_schema.get("anyOf", ()))])
        if '"string"' in types and (raw != "null" or '"null"' not in types):
            return raw
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(raw, raw))
    except (ValueError, TypeError, AttributeError, RecursionError):  # an agent's schema may be anything
        return raw


def tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Tool:
    """Describe a function as chat templates take it."""
    function = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": function}


class Tools:
    """Stores functions by name, with JSON schemas for the arguments.

    Raises `TypeError` for generators, and for functions that a JSON call cannot reach: without a unique name, or with
    an argument that lacks a name, a type or a JSON schema.
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]):
        self._functions: dict[str, TypeAdapter[Any]] = {}
        self.schemas: list[Tool] = []
        for function in functions:
            name = getattr(function, "__name__", "")
            if not re.fullmatch(r"(?!functions\.)[\w.-]{1,64}", name) or name in self._functions:
                raise TypeError(f"tools: {name or function} is not the name of one function; write a def for each")
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise TypeError(f"tools: {name} yields; return the whole result")
            for argument in inspect.signature(function).parameters.values():
                unnamed = argument.kind in (argument.POSITIONAL_ONLY, argument.VAR_POSITIONAL)
                if unnamed or (argument.annotation is argument.empty and argument.kind is not argument.VAR_KEYWORD):
                    raise TypeError(f"tools: {name}({argument}): a call needs name and type; write it as (city: str)")
            try:
                self._functions[name] = TypeAdapter(function)  # type: ignore[arg-type]  # documented by pydantic
                self.schemas.append(tool(name, inspect.getdoc(function), self._functions[name].json_schema()))
            except Exception as error:
                raise TypeError(f"tools: {name}: {error}") from None

    def call(self, call: ToolCall) -> Any:
        """Return the function's result. Raises the function's errors, and `ValueError` if the call has a problem."""
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
