"""Measure the cost of score centering over the engine's top K: updates of one actor with and without it, in turn.

    OMP_NUM_THREADS=1 python benchmarks/score_centering.py [--topk 128] [--repeats 15]

The baseline differs only in centering, and its batches have no top-K lists. It runs in one process with one thread,
with stored fp32 logits and a small dense model with a vocabulary of 32,768. An update includes forward and backward
passes and the optimizer. It is measured in CPU seconds, which other work on the machine hardly changes. A step also
samples, so the share of a step is smaller. Exits with 1 above the limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from gpu_case import QWEN3_06B, Day, Size
from on_quickstart import machine

from dppo_megatron.objectives import build_objective
from dppo_megatron.types import TokenBatch

LIMIT = 0.05
VOCABULARY = 32768
MODEL = {
    **QWEN3_06B,
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


class Small(Day):
    size = Size(MODEL, sequences=16, prompt=16, response=48, micro_batch_tokens=1024)


def main() -> int:
    arguments = arguments_of(__doc__, topk=128)
    with tempfile.TemporaryDirectory() as name:
        day = Small("cpu", Path(name))
        methods = {
            "without": (build_objective("score_centering", centering="none"), day.batches()),
            "centred": (build_objective("score_centering"), list(map(listed, day.batches(topk=arguments.topk)))),
        }
        print_setup(day, arguments)
        settings = {"rollout": {"topk_logprobs": arguments.topk}, "engine": {"max_logprobs": arguments.topk}}
        with day.actor(model={"dtype": "fp32"}, **settings) as actor:
            return compare(actor, methods, arguments.repeats, "centering")


def arguments_of(text: str, topk: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topk", type=int, default=topk)
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


def print_setup(day: Small, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    packages = ", ".join(f"{package} {version(package)}" for package in ("torch", "megatron-core"))
    print(f"{machine()}; {packages}; one thread of a CPU, no GPU")
    print(
        f"{day.size.micro_batch_tokens} tokens, 3/4 of them responses; {MODEL['num_hidden_layers']} layers of "
        f"{MODEL['hidden_size']}, vocabulary {VOCABULARY:,}, K = {arguments.topk}; {arguments.repeats} updates of each"
    )


def compare(actor: Any, methods: dict[str, tuple[Any, list[TokenBatch]]], repeats: int, what: str) -> int:
    """Measure updates of two methods in turn; return 1 if the second costs more than the limit."""
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for number in range(repeats + 1):
        for method, (objective, batches) in methods.items():
            started = time.process_time()
            actor.train_update(batches, objective)
            if number:  # the first creates the optimizer's state
                seconds[method].append(time.process_time() - started)
    for method, each in seconds.items():
        print(f"{method}: median {median(each):.3f} s, best {min(each):.3f} s")
    low, share, high = quantiles([b / a - 1 for a, b in zip(*seconds.values(), strict=True)], n=4)
    spread = f"quartiles {low:.1%} and {high:.1%}"
    print(f"{what} costs {share:.1%} of an update (median of pairs, {spread}); limit {LIMIT:.0%}")
    return int(share > LIMIT)


def listed(batch: TokenBatch) -> TokenBatch:
    """Return the batch with top-K lists of distinct ids, as from an engine."""
    count, width = batch.topk_ids.shape
    ids = (torch.arange(count)[:, None] * 97 + torch.arange(width) * 131) % VOCABULARY
    return replace(batch, topk_ids=torch.where(batch.topk_ids >= 0, ids.to(batch.topk_ids.dtype), batch.topk_ids))


if __name__ == "__main__":
    sys.exit(main())
