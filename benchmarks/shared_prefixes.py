"""Measure the saving of `train.share_prefixes`: updates of an actor with and without it.

    OMP_NUM_THREADS=1 python benchmarks/shared_prefixes.py [--size 1M] [--repeats 7]

It runs in one process with one thread, in fp32, with a whole update in one micro-batch and random weights of the sizes
of `end_to_end.py`. An update includes forward and backward passes and the optimizer. It is measured in CPU seconds,
which other work on the machine hardly changes. Exits with 1 if loss or gradient norm differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
import torch
from end_to_end_task import SIZES, Cell, model_config
from gpu_case import Day, Size
from on_quickstart import machine

from dppo_megatron.data.packing import TokenSequence, pack
from dppo_megatron.objectives import build_objective
from dppo_megatron.types import TokenBatch

SAMPLES = 8
TOLERANCE = 1e-4  # relative difference of a loss and a gradient norm in fp32


@dataclass(frozen=True)
class Groups(Day):
    """`groups` prompts with SAMPLES responses each, in one micro-batch."""

    of: Size | None = None

    @property
    def size(self) -> Size:
        return self.of

    def batch(self, *, share: bool) -> TokenBatch:
        generator, vocabulary = np.random.default_rng(0), self.size.model["vocab_size"]

        def ids(count: int) -> np.ndarray:
            return generator.integers(2, vocabulary, count, dtype=np.int32)

        prompts = [ids(self.size.prompt) for _ in range(self.size.sequences // SAMPLES)]
        sequences = [
            TokenSequence(
                prompt,
                ids(self.size.response),
                loss_weight=1 / (self.size.sequences * self.size.response),
                advantage=(-1.0) ** number,
                columns={"rollout_logprob": np.zeros(self.size.response, np.float32)},
            )
            for prompt in prompts
            for number in range(SAMPLES)
        ]
        return pack(sequences, share_prefixes=share)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1M")
    parser.add_argument(
        "--lengths", default="32+8,32+64,256+64,32+256,256+256", help="prompt + response tokens, with commas"
    )
    parser.add_argument("--sequences", type=int, default=32, help="of an update")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    packages = ", ".join(f"{package} {version(package)}" for package in ("torch", "megatron-core"))
    print(f"{machine()}; {packages}; one thread of a CPU, no GPU")
    print(
        f"{arguments.size}: {arguments.sequences} sequences, {SAMPLES} of each prompt; medians of {arguments.repeats}"
    )
    print(f"{'prompt + response':>18}{'rows':>8}{'shared':>8}{'s':>9}{'shared s':>9}{'ratio':>7}{'of rows':>8}")
    wrong = 0
    for pair in arguments.lengths.split(","):
        prompt, response = map(int, pair.split("+"))
        wrong += not compare(arguments, prompt, response)
    return wrong


def compare(arguments: argparse.Namespace, prompt: int, response: int) -> bool:
    """Compare one pair of lengths and print a line. Return whether loss and gradient norm agree."""
    model = model_config(Cell(arguments.size, response, prompts=1, samples=1)) | {"max_position_embeddings": 4096}
    size = Size(model, arguments.sequences, prompt, response, micro_batch_tokens=1 << 20, topk=0)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    found = {}
    objective = build_objective("dppo_binary_tv", delta=0.2)
    with tempfile.TemporaryDirectory() as name:
        day = Groups("cpu", Path(name), size)
        with day.actor(model={"dtype": "fp32"}) as actor:
            batches = {share: day.batch(share=share) for share in seconds}
            (own,) = actor.logprobs([batches[False]])
            batches = {share: replace(batch, rollout_logprob=own) for share, batch in batches.items()}
            rows = {share: actor.packer(batch).token_ids.shape[1] for share, batch in batches.items()}
            for number in range(arguments.repeats + 1):
                for share, batch in batches.items():
                    started = time.process_time()
                    stats = actor.train_update([batch], objective)
                    if number:  # the first creates the optimizer's state
                        seconds[share].append(time.process_time() - started)
                    found.setdefault(share, (stats.loss, stats.grad_norm))
    whole, shared = median(seconds[False]), median(seconds[True])
    print(
        f"{f'{prompt} + {response}':>18}{rows[False]:>8}{rows[True]:>8}{whole:>9.3f}{shared:>9.3f}"
        f"{shared / whole:>7.2f}{rows[True] / rows[False]:>8.2f}",
        flush=True,
    )
    # The second one follows an update with a learning rate of 1e-6, which changes values far below the tolerance.
    return bool(np.allclose(found[False], found[True], rtol=TOLERANCE, atol=TOLERANCE))


if __name__ == "__main__":
    sys.exit(main())
