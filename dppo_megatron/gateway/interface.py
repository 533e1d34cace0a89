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
# Fields that an interface reads, and fields that change no turn or are only hints. Sampling is that of the run.
_KNOWN = (
    "model messages input instructions system tools stream stream_options max_tokens max_completion_tokens include "
    "max_output_tokens temperature top_p top_k min_p seed top_logprobs parallel_tool_calls max_tool_calls reasoning "
    "reasoning_effort thinking verbosity prediction truncation store metadata user safety_identifier service_tier "
    "cache_control prompt_cache_key prompt_cache_options prompt_cache_retention"
)
KNOWN = frozenset(_KNOWN.split())


class Interface(Protocol):
    """Declares the functions of an interface, which each of the three modules implements."""

    PATH: str
    SERVED: dict[str, Any]  # field -> values that change nothing; other values, and unknown fields, are rejected

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
