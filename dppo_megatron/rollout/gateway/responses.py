"""Implement the OpenAI Responses interface. No items are kept between requests: each request has all items."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from dppo_megatron.rollout.environments.conversation import ChatMessage, RequestRejected, Turn, TurnRequest

from .chat import error
from .interface import MODEL, Body, arguments_of, call, function, optional_text, system

__all__ = ["PATH", "READ", "SERVED", "error", "events", "read", "reply"]

PATH = "/v1/responses"
READ: tuple[str, ...] = ("input", "instructions", "max_output_tokens")
SERVED: dict[str, Any] = {
    "tool_choice": ("auto",),
    "text": ({}, {"format": {"type": "text"}}),
    "background": (False,),
    "top_logprobs": (0,),
    "include": ([], ["reasoning.encrypted_content"]),
}


def read(body: Body) -> TurnRequest:
    messages = system(optional_text(body.get("instructions")))
    request_input = body["input"]
    for item in [{"role": "user", "content": request_input}] if isinstance(request_input, str) else request_input:
        _put(messages, item)
    tools = [function(t.get("type"), t, "parameters") for t in body.get("tools") or ()]
    return TurnRequest(messages, tools, body.get("max_output_tokens"))


def reply(turn: Turn, body: Body) -> Body:
    return _response(turn, body, _items(turn), "incomplete" if turn.truncated else "completed")


def events(turn: Turn, body: Body) -> Iterator[Body]:
    for number, event in enumerate(_events(turn, body)):
        yield {**event, "sequence_number": number}


def _events(turn: Turn, body: Body) -> Iterator[Body]:
    initial_response = _response(turn, body, [], "in_progress")
    yield {"type": "response.created", "response": initial_response}
    yield {"type": "response.in_progress", "response": initial_response}
    for place, item in enumerate(_items(turn)):
        head = {"item_id": item["id"], "output_index": place}
        empty = {**item, **({"status": "in_progress"} if "status" in item else {})}
        match item["type"]:
            case "message":
                (part,) = item["content"]
                text, part_head = part["text"], {**head, "content_index": 0}
                yield {"type": "response.output_item.added", "output_index": place, "item": {**empty, "content": []}}
                yield {"type": "response.content_part.added", **part_head, "part": {**part, "text": ""}}
                yield {"type": "response.output_text.delta", **part_head, "delta": text, "logprobs": []}
                yield {"type": "response.output_text.done", **part_head, "text": text, "logprobs": []}
                yield {"type": "response.content_part.done", **part_head, "part": part}
            case "function_call":
                arguments = item["arguments"]
                yield {"type": "response.output_item.added", "output_index": place, "item": {**empty, "arguments": ""}}
                yield {"type": "response.function_call_arguments.delta", **head, "delta": arguments}
                yield {
                    "type": "response.function_call_arguments.done",
                    **head, "arguments": arguments, "name": item["name"],
                }  # fmt: skip
            case _:
                yield {"type": "response.output_item.added", "output_index": place, "item": empty}
        yield {"type": "response.output_item.done", "output_index": place, "item": item}
    final_response = reply(turn, body)
    yield {"type": f"response.{final_response['status']}", "response": final_response}


def _put(messages: list[ChatMessage], item: Body) -> None:
    """Add an item. A turn's items become a single message, as chat templates expect."""
    match item.get("type", "message"):
        case "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": optional_text(item["content"])})
        case "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            tool_call = call(item["call_id"], item["name"], item["arguments"])
            messages[-1].setdefault("tool_calls", []).append(tool_call)
        case "function_call_output":
            content = optional_text(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        case "reasoning":
            pass  # policy turns are stored as they were sampled
        case other:
            raise RequestRejected(f"unsupported input item {other!r}: use messages, function calls and their outputs")


def _items(turn: Turn) -> list[Body]:
    items: list[Body] = []
    if turn.reasoning:
        thought = [{"type": "summary_text", "text": turn.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{turn.name}", "summary": thought})
    if turn.content or not turn.calls:
        part = {"type": "output_text", "text": turn.content, "annotations": [], "logprobs": []}
        items.append(
            {"type": "message", "id": f"msg_{turn.name}", "role": "assistant", "status": "completed", "content": [part]}
        )
    for number, tool_call in enumerate(turn.calls):
        id = turn.call_id(number)
        head = {"type": "function_call", "id": f"fc_{id}", "call_id": id, "status": "completed"}
        items.append({**head, "name": tool_call.name, "arguments": arguments_of(tool_call)})
    return items


def _response(turn: Turn, body: Body, output: list[Body], status: str) -> Body:
    usage = {
        **{"input_tokens": turn.prompt_tokens, "output_tokens": turn.tokens},
        **{"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}},
        "total_tokens": turn.prompt_tokens + turn.tokens,
    }
    return {
        **{"id": f"resp_{turn.name}", "object": "response", "created_at": int(time.time()), "status": status},
        **{"model": body.get("model") or MODEL, "output": output, "error": None},
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        **{"instructions": body.get("instructions"), "metadata": {}, "parallel_tool_calls": True},
        **{"tool_choice": "auto", "tools": body.get("tools") or [], "temperature": None, "top_p": None},
        "usage": None if status == "in_progress" else usage,
    }
