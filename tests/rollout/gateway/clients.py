"""One conversation with a tool, as the published clients of each interface hold it, streaming and not."""

import json

PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
DESCRIBED = {"name": "look_up", "description": "The number in a row."}


async def chat(url: str, key: str, stream: bool) -> list[str]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        tools = [{"type": "function", "function": {**DESCRIBED, "parameters": PARAMETERS}}]
        messages: list = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "What is a?"}]
        told = []
        while True:
            if stream:
                async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as events:
                    async for _ in events:
                        pass
                    reply = await events.get_final_completion()
            else:
                reply = await client.chat.completions.create(model="m", messages=messages, tools=tools)
            choice = reply.choices[0]
            told.append(f"{choice.finish_reason}: {choice.message.content}")
            if not choice.message.tool_calls:
                return told
            messages.append(choice.message.model_dump(exclude_none=True))
            for call in choice.message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": row(call.function.arguments)})


async def responses(url: str, key: str, stream: bool) -> list[str]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{url}/sessions/{key}/v1", api_key="any", max_retries=0) as client:
        tools = [{"type": "function", **DESCRIBED, "parameters": PARAMETERS}]
        asked = {"model": "m", "instructions": "Be brief.", "tools": tools}
        items: list = [{"role": "user", "content": "What is a?"}]
        told = []
        while True:
            if stream:
                async with client.responses.stream(**asked, input=items) as events:
                    async for _ in events:
                        pass
                    reply = await events.get_final_response()
            else:
                reply = await client.responses.create(**asked, input=items)
            calls = [item for item in reply.output if item.type == "function_call"]
            told.append(f"{'tool_calls' if calls else 'stop'}: {reply.output_text}")
            if not calls:
                return told
            items += [item.model_dump(exclude_none=True) for item in reply.output]
            items += [{"type": "function_call_output", "call_id": c.call_id, "output": row(c.arguments)} for c in calls]


async def messages(url: str, key: str, stream: bool) -> list[str]:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        tools = [{**DESCRIBED, "input_schema": PARAMETERS}]
        said: list = [{"role": "user", "content": "What is a?"}]
        told = []
        while True:
            asked = {"model": "m", "max_tokens": 200, "system": "Be brief.", "messages": said, "tools": tools}
            if stream:
                async with client.messages.stream(**asked) as events:
                    reply = await events.get_final_message()
            else:
                reply = await client.messages.create(**asked)
            calls = [block for block in reply.content if block.type == "tool_use"]
            text = "".join(block.text for block in reply.content if block.type == "text")
            told.append(f"{ {'tool_use': 'tool_calls', 'end_turn': 'stop'}[reply.stop_reason] }: {text}")
            if not calls:
                return told
            said.append(
                {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]}
            )
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": row(json.dumps(c.input))} for c in calls]
            said.append({"role": "user", "content": results})


def row(arguments: str) -> str:
    return str({"a": 1, "b": 2}[json.loads(arguments)["key"]])
