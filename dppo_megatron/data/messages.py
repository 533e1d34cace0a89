"""Bring prompts and answers into one form, so that JSON lines and tables give the same text.

Arrow, the format of tables, gives every object of a column the same fields: absent ones become null, and the order is
that of the first row. A column in which a number is missing or has a fraction stores 72 as 72.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import date
from decimal import Decimal
from typing import Any

from dppo_megatron.errors import shown

from .rows import parse_json, shorten_list

_TEXTS = ("role", "name", "tool_call_id", "reasoning_content", "thinking")  # fields of a message that are text
_TEXT_PARTS = ("text", "input_text", "output_text")  # kinds of parts in the interfaces of OpenAI and Anthropic
_CHAT = re.compile(r"\[?\s*\{.*[\"']role[\"']\s*:", re.DOTALL)
_LARGEST = 2**53  # a float represents larger whole numbers only approximately


def plain(value: Any) -> Any:
    """Return a value of a row as all formats give it: {"b": 1.0, "a": None} gives {"b": 1}.

    Objects lose null fields and have their fields in alphabetical order. Whole numbers are integers, and dates text.
    Raises `ValueError` for a float that may be a rounded integer.
    """
    if isinstance(value, dict):
        return {str(name): plain(value[name]) for name in sorted(value) if value[name] is not None}
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, float | Decimal) and math.isfinite(value):
        if isinstance(value, float) and abs(value) > _LARGEST:
            raise ValueError(f"{value} may be a rounded integer; store such numbers as integers or text")
        return int(value) if value == int(value) else float(value)
    return value.isoformat() if isinstance(value, date) else value


def messages_of(value: Any) -> list[dict[str, Any]] | None:
    """Return messages in the form that chat templates take, or None for a value that is no list of messages.

    A list may be JSON text. Every message gets a text as content, and calls of tools with arguments as an object.
    Raises `ValueError` that names an unknown field or kind of content.
    """
    value = plain(value)
    if isinstance(value, str) and _CHAT.match(text := value.strip()) and text[-1] in "]}":
        try:
            value = plain(parse_json(text))
        except ValueError as error:
            raise ValueError(f"the prompt begins like messages, but is {error}") from None
    turns = [value] if isinstance(value, dict) else value
    if not (isinstance(turns, list) and turns and all(isinstance(turn, dict) and "role" in turn for turn in turns)):
        return None
    return [_message(turn) for turn in turns]


def text_of(content: Any) -> str:
    """Return the text of a message's content: text, or parts like {"type": "text", "text": "1+1="}.

    Raises `ValueError` for other values, and names parts that are not text.
    """
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ValueError(f"a part of type {shown(kind)}: the policy reads only text")
    if isinstance(content, list) and content:
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"the prompt is {type(content).__name__}, expected text")
    return content


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    _check_fields(turn, (*_TEXTS, "content", "tool_calls"), "a message")
    if wrong := [name for name in _TEXTS if not isinstance(turn.get(name, ""), str)]:
        raise ValueError(f"a message whose {wrong[0]} is {type(turn[wrong[0]]).__name__}, expected text")
    if not (calls := turn.get("tool_calls")):
        return {**{name: turn[name] for name in _TEXTS if name in turn}, "content": text_of(turn.get("content"))}
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls is {type(calls).__name__}, expected a list")
    return {**turn, "content": text_of(turn.get("content", "")), "tool_calls": [_call(given) for given in calls]}


def _call(given: Any) -> dict[str, Any]:
    _check_fields(given, ("id", "type", "function", "name", "arguments"), "a call of a tool")
    function = given.get("function", given)
    _check_fields(function, ("id", "type", "name", "arguments"), "a call of a tool")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}")
    if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a call of a tool without a name, or with arguments that are no object")
    identity = {"id": given["id"]} if "id" in given else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _check_fields(value: Any, known: Iterable[str], what: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type(value).__name__}, expected an object")
    if unknown := sorted(value.keys() - set(known)):
        raise ValueError(f"{what} has the field {shown(unknown[0])}; known are {shorten_list(known)}; remove it")
