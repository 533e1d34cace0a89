"""Implement the OpenAI Chat Completions interface."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from dppo_megatron.rollout.environments.conversation import ChatMessage, RequestRejected, Turn, TurnRequest
from dppo_megatron.rollout.environments.tool_messages import described_call

from .interface import MODEL, Body, arguments_of, call, function, optional_text

PATH = "/v1/chat/completions"
READ: tuple[str, ...] = ("messages", "max_tokens", "max_completion_tokens")
SERVED: dict[str, Any] = {
    "n": (1,),
    "stop": ([], ""),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "modalities": (["text"],),
}
# Message fields. The last five change no turn.
_OF_MESSAGES = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal",
                "annotations", "cache_control")  # fmt: skip


def read(body: Body) -> TurnRequest:
    tool_bodies = body.get("tools") or ()
    tools = [function(t.get("type", "function"), t.get("function") or {}, "parameters") for t in tool_bodies]
    return TurnRequest(
        [_message(message) for message in body["messages"]],
        tools,
        next((body[k] for k in ("max_completion_tokens", "max_tokens") if body.get(k) is not None), None),
    )


def reply(turn: Turn, body: Body) -> Body:
    calls = {"tool_calls": _calls(turn)} if turn.calls else {}
    choice = {"index": 0, "message": {**_message_of(turn), **calls}, "finish_reason": _finish(turn), "logprobs": None}
    return {**_head(turn, body, "chat.completion"), "choices": [choice], "usage": _usage(turn)}


def events(turn: Turn, body: Body) -> Iterator[Body]:
    head = _head(turn, body, "chat.completion.chunk")

    def chunk(delta: Body, finish: str | None = None) -> Body:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield chunk(_message_of(turn))
    for number, tool_call in enumerate(_calls(turn)):
        yield chunk({"tool_calls": [{"index": number, **tool_call}]})
    yield chunk({}, _finish(turn))
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": _usage(turn)}


def error(message: str, status: int) -> Body:
    return {"error": {"message": message, "type": "invalid_request_error", "code": status}}


def _message(message: Body) -> ChatMessage:
    if unknown_fields := [name for name, value in message.items() if value and name not in _OF_MESSAGES]:
        raise RequestRejected(f"unsupported message field {unknown_fields[0]}; omit it")
    role = "system" if message["role"] == "developer" else message["role"]
    out: ChatMessage = {"role": role, "content": optional_text(message.get("content"))}
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [call(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls]
    return out | {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}


def _calls(turn: Turn) -> list[Body]:
    return [described_call(turn.call_id(i), c.name, arguments_of(c)) for i, c in enumerate(turn.calls)]


def _message_of(turn: Turn) -> Body:
    reasoning = {"reasoning_content": turn.reasoning} if turn.reasoning else {}
    return {"role": "assistant", "content": turn.content, **reasoning}


def _finish(turn: Turn) -> str:
    return "length" if turn.truncated else "tool_calls" if turn.calls else "stop"


def _head(turn: Turn, body: Body, kind: str) -> Body:
    model = body.get("model") or MODEL
    return {"id": f"chatcmpl-{turn.name}", "object": kind, "created": int(time.time()), "model": model}


def _usage(turn: Turn) -> Body:
    total = turn.prompt_tokens + turn.tokens
    return {"prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.tokens, "total_tokens": total}
