"""Define the common parts of all interfaces: a request becomes a `TurnRequest`, a `Turn` becomes a reply or events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

from dppo_megatron.data.messages import text_of
from dppo_megatron.rollout.environments.conversation import ChatMessage, RequestRejected, Turn, TurnRequest
from dppo_megatron.rollout.environments.tool_messages import described_call
from dppo_megatron.rollout.environments.tools import Tool, ToolCall, tool

Body = dict[str, Any]
MODEL = "policy"  # the policy's name in replies to requests that name no model
# Fields that every interface reads, and fields that change no turn or are only hints. The run sets sampling.
_KNOWN = (
    "model tools stream stream_options temperature top_p top_k min_p seed parallel_tool_calls max_tool_calls reasoning "
    "reasoning_effort thinking verbosity prediction truncation store metadata user safety_identifier service_tier "
    "cache_control prompt_cache_key prompt_cache_options prompt_cache_retention"
)
KNOWN = frozenset(_KNOWN.split())
TYPES: dict[str, type] = {"stream": bool, "stream_options": dict, "tools": list, "messages": list}


class Interface(Protocol):
    """Declares the functions that each of the three interface modules implements."""

    PATH: str
    READ: tuple[str, ...]  # fields of this interface
    SERVED: dict[str, Any]  # field -> values that change nothing; other values, and unknown fields, are rejected

    def read(self, body: Body) -> TurnRequest:
        """Return the turn that a request asks for.

        Raises `RequestRejected`, and KeyError, TypeError, ValueError or AttributeError for a malformed request.
        """

    def reply(self, turn: Turn, body: Body) -> Body: ...

    def events(self, turn: Turn, body: Body) -> Iterator[Body]:
        """Yield the reply as server-sent events. An event with a `type` is named after the type."""

    def error(self, message: str, status: int) -> Body: ...


def call(id: str, name: str, arguments: str | Body) -> Body:
    """Return a tool call in the form that chat templates take."""
    arguments_object = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    if not isinstance(arguments_object, dict):
        raise ValueError("the arguments of a call are not an object")
    return described_call(id, name, arguments_object)


def function(kind: object, described: Body, schema: str) -> Tool:
    """Return a tool from a request. `schema` is the field with the tool parameters. Raises `RequestRejected`."""
    name, parameters = described.get("name"), described.get(schema)
    if kind != "function" or not isinstance(name, str) or not isinstance(parameters, dict | None):
        needed = f"the policy calls only functions, with a string as name and an object as {schema}"
        raise RequestRejected(f"unsupported tool type {kind!r}: {needed}")
    return tool(name, described.get("description"), parameters)


def optional_text(content: Any) -> str:
    """Return message text, "" for null. Raises `ValueError` for other content."""
    return "" if content is None else text_of(content)


def arguments_of(call: ToolCall) -> str:
    return json.dumps(call.arguments)


def system(text: str) -> list[ChatMessage]:
    return [{"role": "system", "content": text}] if text else []
