"""A scripted agent that edits its history as agents do, with a scripted policy and with real engines."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import aiohttp
import numpy as np

from tests.rollout.gateway import clients

STEPS = 5


def user(text: str) -> dict:
    return {"role": "user", "content": text}


class Client:
    """Chat Completions, without a published client, which takes long to import."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str):
        self._http, self._url, self._headers = http, url, {"Authorization": f"Bearer {key}"}

    async def post(self, messages: list, path: str = "/v1/chat/completions", **more) -> tuple[int, dict]:
        body = {"messages": messages, **more}
        async with self._http.post(self._url + path, json=body, headers=self._headers) as reply:
            return reply.status, await reply.json()

    async def say(self, messages: list, **more) -> list:
        """The messages with the reply."""
        status, reply = await self.post(messages, **more)
        assert status == 200, reply
        return [*messages, reply["choices"][0]["message"]]

    async def hang_up(self, messages: list, after_s: float, **more) -> bool:
        """Whether the reply had not come by then."""
        try:
            async with asyncio.timeout(after_s):
                await self.post(messages, **more)
        except TimeoutError:
            return True
        return False


async def session(client: Client, seed: int) -> Counter[str]:
    """Calls tools, edits its history, sums it up, asks again, asks side by side and hangs up; how often it did."""
    rng, did = np.random.default_rng(seed), Counter(sessions=1)
    history = [user("one")]
    for step in range(STEPS):
        tools = [{"type": "function", "function": clients.DESCRIBED}] if rng.random() < 0.5 else []
        match rng.integers(6):
            case 0:  # an edit of the policy's turns, or none yet
                history = [m if m["role"] == "user" else {**m, "content": f"e{step}"} for m in history]
                did["edits"] += step > 0
            case 1:
                history = [user(f"so far {step}")]
                did["compactions"] += 1
            case 2:
                await client.say(history, tools=tools)
                did["asked again"] += 1
            case 3:
                await asyncio.gather(*(client.say([*history, user(text)], tools=tools) for text in "ab"))
                did["asked side by side"] += 2
            case 4:
                did["hung up"] += await client.hang_up(history, 0.01, tools=tools)
        history = await client.say(history, tools=tools)
        called = history[-1].get("tool_calls", ())
        did["tool calls"] += len(called)
        history += [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in called]
        history += [] if called else [user(f"next {step}")]
    return did


async def agent(url, api_key, task, log):
    """Run one session, which follows from the prompt, and add its counts as a line to the file `log`."""
    async with aiohttp.ClientSession() as http:
        did = await session(Client(http, url, api_key), seed=int(task["answer"]))
    with Path(log).open("a") as file:
        file.write(json.dumps(did) + "\n")
    return float(did["tool calls"])
