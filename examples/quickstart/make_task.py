"""The quickstart's task: sums of two two-digit numbers, and a text that often forgets the carry.

    python examples/quickstart/make_task.py runs/quickstart/task --seed 1

The text shows every training sum three times: once with the right answer, and twice with each column added without its
carry (47+85=22 instead of 132). A policy trained on this text answers greedily without the carry. It is therefore right
on the quarter of the sums that carry nothing; on the others a third of its samples is right. The reward checks the sum
and therefore teaches the carry.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from dppo_megatron.hf import small_model

EOS = "<eos>"
VOCABULARY = (small_model.PAD, EOS, *"0123456789+-*=")
HELD_OUT = 500  # of the 8,100 pairs; neither the text nor the training prompts contain them
WITHOUT_CARRY, RIGHT = 2, 1  # answers in the text to each sum

Pair = tuple[int, int]


def make_task(directory: str | Path, seed: int = 1) -> None:
    """Write the files of `write_sums` and `random_model/` below `directory`. The same seed gives the same bytes."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_sums(directory, seed)
    write_random_model(directory / "random_model", seed)


def write_sums(directory: Path, seed: int) -> None:
    """Write the disjoint `train.jsonl` and `heldout.jsonl`, and `warmup.jsonl`, the text that often forgets the carry.

    Rows have the columns `prompt` and `answer`.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    generator = random.Random(seed)
    generator.shuffle(pairs)
    heldout, train = pairs[:HELD_OUT], pairs[HELD_OUT:]
    text = [(pair, answer(pair)) for answer in [right] * RIGHT + [without_carry] * WITHOUT_CARRY for pair in train]
    generator.shuffle(text)
    _write_rows(directory / "heldout.jsonl", ((pair, right(pair)) for pair in heldout))
    _write_rows(directory / "train.jsonl", ((pair, right(pair)) for pair in train))
    _write_rows(directory / "warmup.jsonl", text)


def right(pair: Pair) -> str:
    return str(sum(pair))


def without_carry(pair: Pair) -> str:
    """Return the sum without carries: the last digit of each column. It equals `right` if no column carries."""
    a, b = pair
    return f"{(a // 10 + b // 10) % 10}{(a % 10 + b % 10) % 10}"


def write_random_model(directory: Path, seed: int, vocabulary: Sequence[str] = VOCABULARY) -> None:
    """Write a Hugging Face model directory: Qwen3 with random weights and a tokenizer of single characters."""
    small_model.write_small_model(directory, seed, character_tokenizer(vocabulary))


def character_tokenizer(vocabulary: Sequence[str] = VOCABULARY) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character. It adds no special tokens on encoding."""
    return small_model.character_tokenizer(vocabulary, eos=EOS, positions=64)


def _write_rows(path: Path, rows: Iterable[tuple[Pair, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for (a, b), answer in rows:
            file.write(json.dumps({"prompt": f"{a}+{b}=", "answer": answer}) + "\n")


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("directory", type=Path, help="output directory, created if missing")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    make_task(arguments.directory, arguments.seed)


if __name__ == "__main__":
    main()
