"""Chat with a task's tools, like verifiers' `null` harness, but without a program that `uv` starts for each turn."""

import json
from contextlib import AsyncExitStack
from typing import Any

from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Chat"]


class Chat(Harness[HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        openai = AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, max_retries=0)
        async with openai, AsyncExitStack() as stack:
            tools, names, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                try:
                    reply = await openai.chat.completions.create(model=ctx.model, messages=messages, tools=tools)
                except APIStatusError as error:
                    limit = is_context_overflow(error) or "environment.max_turns" in str(error)  # run limit
                    return ProgramResult(0 if limit else 1, "", str(error))
                message: Any = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or ():
                    invocation = call.function.name, json.loads(call.function.arguments)
                    content = (
                        await call_mcp(connections, names, *invocation)
                        if invocation[0] in names
                        else "error: no such tool"
                    )
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
                if not message.tool_calls:
                    return ProgramResult(0, "", "")
