"""Normalize prompts and answers, so that JSON lines and tables give the same text.

Arrow, the table format, gives all objects in a column the same fields, in the order of the first row. Absent fields
become null. A column with a fraction, or that pandas wrote with a missing number, stores 72 as 72.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from typing import Any

from dppo_megatron.errors import shown

from .rows import parse_json

_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
_CALL = ("id", "type", "function", "name", "arguments")
_TEXT_PARTS = ("text", "input_text", "output_text")  # part types in the OpenAI and Anthropic interfaces
_CHAT = re.compile(r"\[?\s*\{.*[\"'](role|from[\"'].*[\"']value)[\"']\s*:", re.DOTALL)
_LARGEST = 2**53  # a float represents larger whole numbers only approximately


def plain(value: Any) -> Any:
    """Normalize a row value, so that all formats give the same value: {"b": 1.0, "a": None} gives {"b": 1}.

    Objects lose null fields, and their fields are sorted by name. Whole numbers become integers, and dates text. Raises
    `ValueError` for a float that may be a rounded integer.
    """
    if isinstance(value, dict):
        return {str(name): plain(value[name]) for name in sorted(value) if value[name] is not None}
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, float | Decimal) and math.isfinite(value):
        if abs(float(value)) > _LARGEST and (isinstance(value, float) or value % 1):
            raise ValueError(f"{value} may be a rounded integer; store such numbers as integers or text")
        return int(value) if value == int(value) else float(value)
    return value.isoformat() if isinstance(value, date) else value


def messages_of(value: Any) -> list[dict[str, Any]] | None:
    """Return messages as chat templates take them, or None if the value is neither a message nor a message list.

    The value may be JSON text. Every message gets text as content, and tool calls get an object as arguments. Raises
    `ValueError` that names an unknown field or content type.
    """
    value = plain(value)
    if isinstance(value, str) and _CHAT.match(text := value.strip()) and text[-1] in "]}":
        try:
            value = plain(parse_json(text))
        except ValueError as error:
            raise ValueError(f"the prompt begins like messages, but cannot be read: {error}") from None
    turns = [value] if isinstance(value, dict) else value
    if not (
        isinstance(turns, list) and turns and all(isinstance(t, dict) and {"role", "from"} & t.keys() for t in turns)
    ):
        return None
    return [_message(**_checked_fields(turn, _MESSAGE, "message")) for turn in turns]


def text_of(content: Any) -> str:
    """Return the text of message content: text, or parts like {"type": "text", "text": "1+1="}.

    Raises `ValueError` for other values, and names the type of a part that is not text.
    """
    if not isinstance(content, list):
        if not isinstance(content, str):
            raise ValueError(f"the prompt is {type(content).__name__}, expected text")
        return content
    kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content]
    if unsupported_kinds := [kind for kind in kinds if kind not in _TEXT_PARTS]:
        raise ValueError(f"unsupported content part {shown(unsupported_kinds[0])}: the policy reads only text")
    return "".join(text_of(part.get("text")) for part in content)


def _message(content: Any = None, tool_calls: Any = (), **fields: Any) -> dict[str, Any]:
    if not tool_calls:
        return {**fields, "content": text_of(content)}
    calls = tool_calls if isinstance(tool_calls, list) else [tool_calls]
    return {**fields, "content": text_of(content or ""), "tool_calls": [_call(call) for call in calls]}


def _call(call: Any) -> dict[str, Any]:
    """Return a tool call with the function in a separate field; arguments may be JSON text."""
    whole = _checked_fields(call, _CALL, "call of a tool")
    function = _checked_fields(whole.get("function", whole), _CALL, "call of a tool")
    arguments = function.get("arguments", {})
    arguments = parse_json(arguments or "{}") if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call needs a name, and an object as arguments")
    identity = {"id": whole["id"]} if "id" in whole else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _checked_fields(value: Any, field_names: Sequence[str], kind: str) -> dict[str, Any]:
    """Return an object without null fields. Raises `ValueError` for an unknown field."""
    fields = {n: v for n, v in value.items() if v is not None} if isinstance(value, dict) else {type(value).__name__: 0}
    if unknown := sorted(fields.keys() - set(field_names)):
        raise ValueError(f"a {kind} has {shown(unknown[0])}; the known fields are {', '.join(field_names)}; remove it")
    return fields
