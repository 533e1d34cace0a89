"""Define the common parts of the interfaces: a request becomes a `TurnRequest`, a `Turn` becomes a reply or events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

from dppo_megatron.environments.conversation import ChatMessage, Turn, TurnRequest
from dppo_megatron.environments.tool_messages import described_call
from dppo_megatron.environments.tools import ToolCall

Body = dict[str, Any]
MODEL = "policy"  # the policy's name in replies to requests that name no model


class Interface(Protocol):
    """Declares the functions of an interface, which each of the three modules implements."""

    PATH: str
    SERVED: dict[str, Any]  # setting -> collection of the values that change nothing; others are rejected

    def read(self, body: Body) -> TurnRequest:
        """Return the turn that a request asks for.

        Raises `RequestRejected`, and KeyError, TypeError, ValueError or AttributeError for a malformed request.
        """

    def reply(self, turn: Turn, body: Body) -> Body: ...

    def events(self, turn: Turn, body: Body) -> Iterator[Body]:
        """Yield the reply as server-sent events. An event with a `type` is named after it."""

    def error(self, message: str, status: int) -> Body: ...


def call(id: str, name: str, arguments: str | Body) -> Body:
    """Return a tool call in the form that chat templates take."""
    given = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    return described_call(id, name, given)


def arguments_of(called: ToolCall) -> str:
    return json.dumps(called.arguments)


def system(text: str) -> list[ChatMessage]:
    return [{"role": "system", "content": text}] if text else []
