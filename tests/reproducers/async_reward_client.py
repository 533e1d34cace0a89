"""An async reward with one shared client (openai, httpx, aiohttp) loses half of its samples or all but the first.

    PYTHONPATH=. python tests/reproducers/async_reward_client.py

The judge is a local server that always answers 1.0. Prints the samples that failed for each client.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

_CHOICE = b'{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":"1.0"}}'
CHAT = b'{"id":"a","object":"chat.completion","created":1,"model":"m","choices":[' + _CHOICE + b"]}"


class Judge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(CHAT)))
        self.end_headers()
        self.wfile.write(CHAT)

    def log_message(self, *_):
        pass


REWARDS = """
import aiohttp, httpx, openai  # an import on a busy machine may exceed the time limit of a reward
URL = "http://127.0.0.1:{port}/v1"
_clients = {{}}
async def by_openai(prompt, response_text):
    client = _clients.setdefault("openai", openai.AsyncOpenAI(base_url=URL, api_key="x", max_retries=0))
    reply = await client.chat.completions.create(model="m", messages=[{{"role": "user", "content": response_text}}])
    return float(reply.choices[0].message.content)
async def by_httpx(prompt, response_text):
    client = _clients.setdefault("httpx", httpx.AsyncClient(trust_env=False))
    return float((await client.post(URL + "/x", json={{}})).json()["choices"][0]["message"]["content"])
async def by_aiohttp(prompt, response_text):
    if "aiohttp" not in _clients:
        _clients["aiohttp"] = aiohttp.ClientSession()
    async with _clients["aiohttp"].post(URL + "/x", json={{}}) as reply:
        return float((await reply.json())["choices"][0]["message"]["content"])
"""


async def score(name):
    from dppo_megatron.config.task import RewardConfig
    from dppo_megatron.rollout.rewards.pool import RewardPool
    from dppo_megatron.types import Prompt

    prompt = Prompt(0, 0, np.array([1], np.int32), "q", "1", {"prompt": "q", "answer": "1"}, "")
    with RewardPool(RewardConfig(name=name, workers=1, timeout_s=10)) as pool:
        checked = pool.try_once([prompt])
        _, failed = await pool.score(prompt, ["a"] * 8)
        return checked, failed, pool.last_failure


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "shared_client_rewards.py").write_text(REWARDS.format(port=server.server_port))
        os.environ["PYTHONPATH"] = f"{directory}:{os.environ.get('PYTHONPATH', os.getcwd())}"
        sys.path[:0] = [directory, os.getcwd()]
        wrong = 0
        for client in ("by_openai", "by_httpx", "by_aiohttp"):
            checked, failed, last = asyncio.run(score(f"shared_client_rewards:{client}"))
            wrong += int(failed.sum())
            said = f"{int(failed.sum())} of 8 samples failed ({last[:60]})"
            print(f"{client}: the check at the start finds {checked or 'nothing'}; {said}")
        print(f"WRONG: {wrong} of 24 samples lost their reward" if wrong else "right")
        sys.exit(bool(wrong))
