"""An agent that is written with the published clients, which take long to import."""

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI


async def converses(url, api_key, task):
    """Hold one conversation, first with OpenAI's client, then two turns with Anthropic's."""
    messages = [{"role": "user", "content": task["prompt"]}]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key) as openai:
        reply = await openai.chat.completions.create(model="policy", messages=messages)
    messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    async with AsyncAnthropic(base_url=url, api_key=api_key) as anthropic:
        for asked in ("1+1=", "2+2="):
            messages.append({"role": "user", "content": asked})
            said = await anthropic.messages.create(model="policy", max_tokens=16, messages=messages)
            messages.append({"role": "assistant", "content": said.content[0].text})
    return float(len(said.content[0].text) % 2)
