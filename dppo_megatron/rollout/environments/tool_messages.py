"""Write tool calls and results as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from .tools import Tool, ToolCall, tool, tool_calls

ChatMessage = dict[str, Any]  # an OpenAI chat message: role, content (text), tool_calls (arguments as an object)
Render = Callable[[Sequence[ChatMessage], Sequence[Tool]], str]
"""(messages, tools) -> the chat as the model reads it, up to the start of its answer. Raises `ValueError`."""


def described_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant_message(content: str, calls: Iterable[tuple[str, ToolCall]] = ()) -> ChatMessage:
    """Return a turn with tool calls, given as (id, call)."""
    call_entries = [described_call(id, call.name, call.arguments) for id, call in calls]
    return {"role": "assistant", "content": content, **({"tool_calls": call_entries} if call_entries else {})}


def render_turns(
    render: Callable[[Sequence[ChatMessage]], str], sampled: Sequence[ChatMessage], sent: Sequence[ChatMessage]
) -> str:
    """Render a chat with turns as sampled or, if the template rejects them, with `tool_calls`.

    The gpt-oss and Mistral templates accept a tool result only after `tool_calls`. Raises `ValueError`.
    """
    for messages in (sampled, sent):
        with suppress(ValueError):
            return render(messages)
    return render(sampled)


def tools_problem(render: Render) -> str | None:
    """Return why tools do not work with a chat template, and the remedy; None if they work.

    The template must show tools, write a call that `tool_calls` returns unchanged, and accept results.
    """

    def with_tools(messages: Sequence[ChatMessage]) -> str:
        return render(messages, tools)

    types = {"product": {"type": "string"}, "count": {"type": "integer"}, "more": {"type": "object"}}
    tools = [tool("price", "The price.", {"type": "object", "properties": types, "required": list(types)})]
    user, call = {"role": "user", "content": "?"}, ToolCall("price", {"product": "7", "count": 2, "more": {"a": ["é"]}})
    forms: tuple[Any, Any] = call.arguments, json.dumps(call.arguments)
    problems = []
    # Mistral's template needs nine-letter ids, Kimi's needs names in the ids, and DeepSeek's needs arguments as text.
    for id, arguments in product((call.named("", 0), "functions.price:0"), forms):
        call_message = assistant_message("", [(id, call._replace(arguments=arguments))])
        result = {"role": "tool", "content": "1", "tool_call_id": id, "name": call.name}
        try:
            if with_tools([user]) == render([user], ()):
                raise ValueError("it does not show tools to the policy")
            prefix, _, suffix = with_tools([user, assistant_message("§")]).partition("§")
            call_text = with_tools([user, call_message]).removeprefix(prefix).removesuffix(suffix)
            if [parsed_call[:3] for parsed_call in tool_calls(call_text, tools)] != [call[:3]]:
                raise ValueError(f"it writes a call in an unknown form: {call_text[-200:]!r}")
            raw = assistant_message(call_text)
            render_turns(
                with_tools, [user, raw, result, raw, result], [user, call_message, result, call_message, result]
            )
            return None
        except ValueError as error:
            problems.append(f"the model's chat template does not suit them: {error}; use another model or template")
    return problems[0]
