"""What a turn costs through the gateway, beside the same turn asked of the sampler, and what an open session takes.

    python benchmarks/gateway.py [--sessions 64] [--turns 4] [--turn-s 2] [--tokens 200] [--open 1000] [--directory DIR]

The engine is a coroutine that returns `--tokens` tokens after `--turn-s` seconds, a half more or less: what is measured
is the gateway's own (HTTP, chat template, tokens, tool calls); both sides write journals. Clients and gateway share a
process, so the clients' work counts, too.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from transformers import AutoTokenizer

from dppo_megatron.data.prompts import render_chat
from dppo_megatron.environments.conversation import Conversation
from dppo_megatron.environments.journals import Journals, Turns
from dppo_megatron.gateway import Gateway
from dppo_megatron.types import Rollout
from tests.support.tokenizers import save_character_model

EOS = 1
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "<assistant>"
)


def sampled(arguments: argparse.Namespace) -> Rollout:
    ids = np.random.default_rng().integers(20, 90, arguments.tokens).astype(np.int32)
    ids[-1] = EOS
    return Rollout(ids, -np.ones(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop")


async def sample(arguments: argparse.Namespace, turns: Turns, behind: np.ndarray, most: int | None) -> Rollout:
    await asyncio.sleep(arguments.turn_s * arguments.random.uniform(0.5, 1.5))
    rollout = sampled(arguments)
    await turns.add(behind, rollout)
    return rollout


async def directly(arguments: argparse.Namespace, turns: Turns) -> float:
    """Seconds a turn."""
    began, behind = time.perf_counter(), np.arange(100, dtype=np.int32)
    for _ in range(arguments.turns):
        rollout = await sample(arguments, turns, behind, None)
        behind = np.concatenate([behind, rollout.token_ids])
    return (time.perf_counter() - began) / arguments.turns


async def talk(arguments: argparse.Namespace, http: aiohttp.ClientSession, url: str, key: str) -> float:
    """Seconds a turn."""
    began, messages = time.perf_counter(), [{"role": "user", "content": "x" * 100}]
    for _ in range(arguments.turns):
        headers = {"Authorization": f"Bearer {key}"}
        async with http.post(f"{url}/v1/chat/completions", json={"messages": messages}, headers=headers) as reply:
            messages.append((await reply.json())["choices"][0]["message"])
        messages.append({"role": "user", "content": "go on"})
    return (time.perf_counter() - began) / arguments.turns


async def through(arguments, tokenizer, gateway: Gateway, http: aiohttp.ClientSession, turns: Turns) -> float:
    conversation = Conversation(tokenizer, partial(render_chat, tokenizer), partial(sample, arguments, turns))
    async with gateway.session(conversation) as key:
        seconds = await talk(arguments, http, gateway.url, key)
    assert len(conversation.finished()) == 1  # every turn went on behind the one before
    return seconds


async def main(arguments: argparse.Namespace, directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_character_model(directory / "model", chat_template=TEMPLATE))
    journals, n = Journals(directory / "turns", ()), arguments.sessions
    means: dict[str, float] = {}
    cpu = psutil.Process().cpu_times
    async with Gateway("127.0.0.1") as gateway, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for name, position in (("warm", 0), ("sampler", 1), ("gateway", 2)):
            arguments.random = np.random.default_rng(0)
            seats, before = await journals.turns(position, n, 1.0), cpu().user + cpu().system
            if name == "sampler":
                each = await asyncio.gather(*(directly(arguments, seat) for seat in seats))
            else:
                each = await asyncio.gather(*(through(arguments, tokenizer, gateway, http, seat) for seat in seats))
            used = (cpu().user + cpu().system - before) / (n * arguments.turns)
            print(f"{name:8s} {1e3 * np.mean(each):8.1f} ms a turn, {1e3 * used:6.2f} ms of it computing", flush=True)
            means[name] = float(np.mean(each))
        overhead = means["gateway"] / means["sampler"] - 1
        print(f"overhead {100 * overhead:8.2f} % of a turn of {arguments.turn_s:g} s, {n} sessions at once")
        arguments.turn_s = 0.0
        memory, keep = psutil.Process().memory_info().rss, []
        for _ in range(arguments.open):
            conversation = Conversation(tokenizer, partial(render_chat, tokenizer), partial(sample, arguments, Turns()))
            keep.append(gateway.session(conversation))
            await talk(arguments, http, gateway.url, await keep[-1].__aenter__())
        grown = (psutil.Process().memory_info().rss - memory) / 1e6
        print(f"{arguments.open} open sessions of {arguments.turns} turns of {arguments.tokens} tokens: {grown:.0f} MB")
        for session in keep:
            await session.__aexit__(None, None, None)
    journals.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-s", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--open", type=int, default=1000)
    parser.add_argument("--directory", type=Path, help="default: a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as made:
        asyncio.run(main(given, Path(made)))
