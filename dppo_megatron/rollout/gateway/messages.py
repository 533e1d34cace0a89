"""Implement the Anthropic Messages interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dppo_megatron.data.messages import text_of
from dppo_megatron.rollout.environments.conversation import ChatMessage, RequestRejected, Turn, TurnRequest

from .interface import MODEL, Body, call, function, optional_text, system

PATH = "/v1/messages"
READ: tuple[str, ...] = ("messages", "system", "max_tokens")
SERVED: dict[str, Any] = {"stop_sequences": ([],), "tool_choice": ({"type": "auto"},)}


def read(body: Body) -> TurnRequest:
    messages = system(optional_text(body.get("system")))
    for message in body["messages"]:
        _put(messages, message)
    if messages and messages[-1]["role"] == "assistant":
        raise RequestRejected("the last message is the policy's, and its turn cannot be prefilled; end with another")
    kinds = {"custom": "function"}
    tools = [function(kinds.get(k := t.get("type", "custom"), k), t, "input_schema") for t in body.get("tools") or ()]
    return TurnRequest(messages, tools, body["max_tokens"])


def reply(turn: Turn, body: Body) -> Body:
    return {**_head(turn, body), "content": _blocks(turn), "stop_reason": _stop(turn), "usage": _usage(turn)}


def events(turn: Turn, body: Body) -> Iterator[Body]:
    message = {**_head(turn, body), "content": [], "stop_reason": None, "usage": {**_usage(turn), "output_tokens": 0}}
    yield {"type": "message_start", "message": message}
    for place, block in enumerate(_blocks(turn)):
        match block["type"]:
            case "text":
                empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            case "thinking":
                empty = {**block, "thinking": "", "signature": ""}
                delta = {"type": "thinking_delta", "thinking": block["thinking"]}
            case _:
                empty = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": place, "content_block": empty}
        yield {"type": "content_block_delta", "index": place, "delta": delta}
        yield {"type": "content_block_stop", "index": place}
    yield {
        "type": "message_delta",
        "delta": {"stop_reason": _stop(turn), "stop_sequence": None},
        "usage": {"output_tokens": turn.tokens},
    }
    yield {"type": "message_stop"}


def error(message: str, status: int) -> Body:
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _put(messages: list[ChatMessage], message: Body) -> None:
    """Add a message. Tool results in a user message become separate messages."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    text_blocks: list[Body] = []
    calls: list[Body] = []
    for block in content:
        match block["type"]:
            case "tool_result":
                result = {"role": "tool", "tool_call_id": block["tool_use_id"]}
                messages.append({**result, "content": optional_text(block.get("content"))})
            case "tool_use":
                calls.append(call(block["id"], block["name"], block["input"]))
            case "thinking" | "redacted_thinking":
                pass  # policy turns are stored as they were sampled
            case "text":
                text_blocks.append(block)
            case other:
                raise RequestRejected(f"unsupported content block {other!r}: the policy reads only text")
    if text_blocks or calls:
        messages.append({"role": role, "content": text_of(text_blocks), **({"tool_calls": calls} if calls else {})})


def _blocks(turn: Turn) -> list[Body]:
    blocks: list[Body] = []
    if turn.reasoning:
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": turn.name})
    if turn.content or not turn.calls:
        blocks.append({"type": "text", "text": turn.content})
    return blocks + [
        {"type": "tool_use", "id": turn.call_id(i), "name": c.name, "input": c.arguments}
        for i, c in enumerate(turn.calls)
    ]


def _stop(turn: Turn) -> str:
    return "max_tokens" if turn.truncated else "tool_use" if turn.calls else "end_turn"


def _head(turn: Turn, body: Body) -> Body:
    model = body.get("model") or MODEL
    return {"id": f"msg_{turn.name}", "type": "message", "role": "assistant", "model": model, "stop_sequence": None}


def _usage(turn: Turn) -> Body:
    return {"input_tokens": turn.prompt_tokens, "output_tokens": turn.tokens}
