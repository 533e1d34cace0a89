"""Measure how fast groups are written to the bank, and how long that blocks the orchestrator's event loop.

    python benchmarks/bank_write.py [--tokens 16384] [--samples 16] [--topk 20] [--groups 6] [--directory DIR]

One process imitates the orchestrator: its event loop passes finished groups to the writer. Another task wakes up every
millisecond and records its delay. With --blocking the loop waits for each group, as it did before the writer had a
thread. The first figure is the delay while nothing is written, which is the noise of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np

from dppo_megatron.bank import BankReader, BankWriter
from dppo_megatron.types import Prompt, Rollout, RolloutGroup

TICK_S = 0.001


def make_group(position: int, arguments: argparse.Namespace) -> RolloutGroup:
    rng = np.random.default_rng(position)
    size, k = arguments.tokens, arguments.topk
    rollouts = tuple(
        Rollout(
            token_ids=rng.integers(0, 150_000, size).astype(np.int32),
            rollout_logprob=-rng.random(size, np.float32),
            versions=np.zeros(size, np.int32),
            finish_reason="stop",
            topk_ids=rng.integers(0, 150_000, (size, k)).astype(np.int32) if k else None,
            rollout_topk_logprob=-rng.random((size, k), np.float32) if k else None,
        )
        for _ in range(arguments.samples)
    )
    prompt = Prompt(position, position, np.arange(512, dtype=np.int32), "text", "42")
    return RolloutGroup(
        prompt, rollouts, np.zeros(len(rollouts), np.float32), np.zeros(len(rollouts), bool), temperature=1.0
    )


async def measure(directory: Path, arguments: argparse.Namespace) -> tuple[list[float], list[float], float, float]:
    """Return seconds for which the loop was blocked without a group and with each, seconds to write all, and MB."""
    idle, blocked, written = [], [], []
    late = 0.0

    async def tick() -> None:
        nonlocal late
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_S)
            late = max(late, time.perf_counter() - before - TICK_S)

    ticking = asyncio.create_task(tick())
    with BankWriter(directory, arguments.groups + 1, fsync=False) as writer:
        for position in range(arguments.groups):
            group = make_group(position, arguments)
            await asyncio.sleep(0.05)
            late = 0.0
            await asyncio.sleep(0.2)
            idle.append(late)
            late, started = 0.0, time.perf_counter()
            if arguments.blocking:
                writer.append(group)
            else:
                await asyncio.wrap_future(writer.begin_append(group))
            written.append(time.perf_counter() - started)
            await asyncio.sleep(2 * TICK_S)
            blocked.append(late)
    ticking.cancel()
    reader = BankReader(directory)
    size = sum(entry.size for entry in reader.entries(0, reader.refresh()))
    return idle, blocked, sum(written), size / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a response")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--topk", type=int, default=20)
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument(
        "--directory", type=Path, help="a directory on the file system to measure; default: a temporary one"
    )
    parser.add_argument("--blocking", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        idle, blocked, seconds, megabytes = asyncio.run(measure(Path(directory), arguments))
    print(f"{arguments.groups} groups of {megabytes / arguments.groups:.0f} MB: {megabytes / seconds:.0f} MB/s")
    print(f"event loop blocked {1000 * np.median(idle):.1f} ms while nothing is written (median)")
    print(
        f"event loop blocked {1000 * np.median(blocked):.1f} ms a group (median), {1000 * max(blocked):.1f} ms at most"
    )


if __name__ == "__main__":
    main()
