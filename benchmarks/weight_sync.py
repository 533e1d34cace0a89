"""Measure publishing a model of about 1 GB to a real vLLM server: bytes, seconds and share of the memory-copy speed.

    python benchmarks/weight_sync.py [--layers 28] [--repeats 3] [--memory /dev/shm] [--changed 0.01]

One trainer rank and one server compute in bf16; one run measures both transports. Over shared storage it also measures
publishes of deltas, with one value in a hundred changed (weight_sync.full_every; the first one is full and does not
count). Each publish includes its weight check: the engine must score a fixed text exactly as it did when it loaded the
same weights itself. The engine's part (unpacking into its own layout) is also measured separately, by loading a
directory that is already in memory.

Versions are written to memory (weight_sync.directory). The last table compares full publishes with deltas. It has the
pause and its parts in the engine's worker (reading files and creating tensors, loading, packing for the kernels,
fingerprints), and the bytes compared with 1.2 x (changed values and their indices). 28 layers are 0.5 billion
parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dppo_megatron.config import Config
from dppo_megatron.hf import load_into, make_random_hf_model, read_hf_config
from dppo_megatron.rollout.engines.guard.asgi import ROOTS_VARIABLE
from dppo_megatron.rollout.engines.kinds import build_engine, kind_of, server_environment
from dppo_megatron.rollout.engines.protocol import Engine
from dppo_megatron.rollout.engines.secret import make_secret
from dppo_megatron.rollout.fleet.live_engines import LiveEngines
from dppo_megatron.rollout.fleet.registry import free_port
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.actor import init_layout
from dppo_megatron.train.actor.model import build_model
from dppo_megatron.train.actor.model_config import transformer_config
from dppo_megatron.train.weight_sync import PublishResult, build_publisher
from dppo_megatron.train.weight_sync.engine_thread import EngineThread
from dppo_megatron.weights.place import clear

CHECK_TOKENS = np.arange(3, 67, dtype=np.int32)
CHANGED = 0.01  # share of the values
START_TIMEOUT_S = 300
PARTS = ("read", "load", "pack", "fingerprint")


def model_config(layers: int) -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32768,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }


def changed(policy: Path, out: Path, share: float) -> Path:
    """Return a copy of `policy` with the lowest bit flipped in `share` of its values."""
    shutil.copytree(policy, out)
    generator = torch.Generator().manual_seed(0)
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        for tensor in tensors.values():
            tensor.view(torch.int16)[torch.rand(tensor.shape, generator=generator) < share] ^= 1
        save_file(tensors, file, {"format": "pt"})
    return out


def run_config(
    directory: Path,
    urls: tuple[str, ...] = (),
    transport: str = "shared_storage",
    full_every: int = 1,
    memory: Path | None = None,
) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(directory / "run")},
            "model": {"path": str(directory / "a"), "dtype": "bf16"},
            "train": {"steps": 1},
            "data": {"train": "unused"},
            "engine": {
                "urls": urls,
                "dtype": "bf16",
                "max_model_len": 128,
                "max_num_seqs": 8,
                "kv_cache_bytes": 1 << 28,
            },
            "weight_sync": {
                **{"transport": transport, "full_every": full_every, "directory": memory},
                **{"timeout_s": 120, "probe_tolerance": 1e-6},
            },
        }
    )


@contextmanager
def server(config: Config, log: Path) -> Iterator[str]:
    port = free_port()
    with log.open("wb") as output:
        make_secret(config)
        environment = server_environment(config, 0)
        roots = environment[ROOTS_VARIABLE]
        process = subprocess.Popen(
            kind_of(config).command(config, port, config.model.path, 0),
            env=os.environ | environment | {ROOTS_VARIABLE: f"{roots}:{config.model.path.parent}"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the server did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def copy_speed(nbytes: int) -> float:
    """Return the bytes per second of one thread's memory copy, counting each copied byte once."""
    source = torch.ones(min(nbytes, 1 << 30), dtype=torch.uint8)
    target = torch.ones_like(source)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return len(source) / median(seconds)


def engine_alone(config: Config, url: str, policies: list[Path], repeats: int) -> tuple[list[np.ndarray], float]:
    """Return the engine's own scores of each policy, and the median seconds in which it loads a directory."""

    async def measure() -> tuple[list[np.ndarray], float]:
        engine = build_engine(config, url)
        scores, seconds = [], []
        for number in range(max(2, repeats)):
            policy = policies[number % 2]
            started = time.perf_counter()
            await engine.load_weights(policy, 0)
            seconds.append(time.perf_counter() - started)
            if number < 2:
                scores.append(await engine.score(CHECK_TOKENS))
        await engine.close()
        return scores, median(seconds)

    return asyncio.run(measure())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=5, help="publishes of each transport")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="directory of the versions")
    parser.add_argument("--changed", type=float, default=CHANGED, help="share of the values that a delta changes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir=arguments.memory) as memory:
        directory, memory = Path(name), Path(memory) / "versions"
        policies = [directory / "a", directory / "b"]
        for seed, policy in enumerate(policies):
            make_random_hf_model(policy, model_config(arguments.layers), seed, dtype=torch.bfloat16)
        config = run_config(directory)
        layout = init_layout(config)
        hf = read_hf_config(policies[0])
        actor = SimpleNamespace(
            model_chunks=build_model(hf, config, layout, transformer_config(hf, config)), hf=hf, layout=layout
        )
        with server(config, directory / "log") as url:
            scores, alone_s = engine_alone(config, url, policies, arguments.repeats)
            assert np.abs(scores[0] - scores[1]).max() > 0.01, "the two policies must differ"
            near = [policies[0], changed(policies[0], directory / "c", arguments.changed)]
            near_scores, _ = engine_alone(config, url, near, 2)
            nbytes = sum(file.stat().st_size for file in policies[0].glob("*.safetensors"))
            speed = copy_speed(nbytes)
            print(
                f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
                f"torch {version('torch')}, vLLM on the CPU; {nbytes / 1e9:.2f} GB of bf16 weights, "
                f"{torch.get_num_threads()} trainer thread(s)"
            )
            print(f"memory copy, one thread: {speed / 1e9:.1f} GB/s; the engine loads a directory that is in memory "
                  f"in {alone_s:.2f} s ({nbytes / alone_s / 1e9:.2f} GB/s)")  # fmt: skip
            print(f"{'transport':<16}{'export s':>9}{'engine s':>9}{'pause s':>8}{'check s':>8}{'sum s':>7}{'GB/s':>7}"
                  f"{'of copy':>9}")  # fmt: skip
            broadcast = run_config(directory, (url,), "broadcast")
            publish_all(broadcast, actor, policies, scores, arguments.repeats, speed)
            rows = {}
            for name, full_every in (("whole", 1), ("what changed", 1000)):
                stored = run_config(directory, (url,), full_every=full_every, memory=memory)
                rows[name] = publish_all(stored, actor, near, near_scores, arguments.repeats, speed)
            side_by_side(rows, nbytes // torch.bfloat16.itemsize)
            clear(RunDir(stored.run.dir))
        layout.close()


def side_by_side(rows: dict[str, tuple[list[PublishResult], list[dict[str, float]]]], elements: int) -> None:
    """Print medians of full publishes and deltas. `rest` of a pause is the time between the server's processes."""
    print(f"\n{'seconds':<16}" + "".join(f"{part:>13}" for part in ("pause", *PARTS, "rest", "to load")))
    pauses = []
    for name, (published, parts) in rows.items():
        pause, load = (median(getattr(p, f"{part}_s") for p in published) for part in ("pause", "load"))
        spent = [median(part[f"{which}_s"] for part in parts) for which in PARTS]
        print(f"{name:<16}" + "".join(f"{value:>13.3f}" for value in (pause, *spent, pause - sum(spent), load)))
        pauses.append(pause)
    print(f"{'ratio of pauses':<16}{pauses[1] / pauses[0]:>13.3f}")
    (delta, *_) = rows["what changed"][0]
    least = delta.changed_share * elements * (torch.bfloat16.itemsize + 2)  # an index of 2 bytes
    print(
        f"{delta.nbytes:,} bytes for {delta.changed_share:.2%} of {elements:,} values: {delta.nbytes / least:.3f} x "
        "(changed values and indices); at most 1.2 x is asked for"
    )


def recording(parts: list[dict[str, float]], config: Config, url: str) -> Engine:
    """Return a client that keeps the server's report of each update."""
    engine = build_engine(config, url)
    ask = engine._calls.json

    async def asked(what: str, path: str, *arguments, **options) -> dict:
        reply = await ask(what, path, *arguments, **options)
        if path == "/dppo/load_weights":
            parts.append(reply["parts"])
        return reply

    engine._calls.json = asked
    return engine


def publish_all(
    config: Config, actor, policies, scores, repeats: int, speed: float
) -> tuple[list[PublishResult], list[dict[str, float]]]:
    parts = []
    engines = EngineThread(LiveEngines(config, build=partial(recording, parts)))
    publisher = build_publisher(config, actor, engines, CHECK_TOKENS)
    published = []
    for number in range(repeats + 1):
        which = (number + 1) % 2
        load_into(actor.model_chunks, policies[which])
        actor.score = lambda _, which=which: scores[which]
        published.append(publisher.publish(number + 1))
    publisher.close()
    export, load, pause, check = (
        median(getattr(p, f"{part}_s") for p in published[1:]) for part in ("export", "load", "pause", "check")
    )
    total = export + load
    rate = published[-1].nbytes / total
    changed_share = published[-1].changed_share
    name = config.weight_sync.transport if changed_share is None else "what changed"
    share = "" if changed_share is None else f", {changed_share:.2%} of the values changed"
    print(
        f"{name:<16}{export:>9.2f}{load:>9.2f}{pause:>8.2f}{check:>8.2f}{total:>7.2f}{rate / 1e9:>7.2f}"
        f"{rate / speed:>9.1%}   ({published[-1].nbytes:,} bytes{share})",
        flush=True,
    )
    return published[1:], parts[1:]


if __name__ == "__main__":
    main()
