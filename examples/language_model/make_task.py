"""Tasks for the language model, with separate prompts for training and evaluation.

    python examples/language_model/make_task.py runs/language_model/sums --seed 1
    PYTHONPATH=.venv/reasoning-gym python examples/language_model/make_task.py DIRECTORY --task reasoning_gym

`sums` are of two two-digit numbers. `reasoning_gym` adds and subtracts three numbers of at most two digits, with the
question and answer of reasoning-gym's task chain_sum.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

HELD_OUT = 200
PROCEDURAL = 4000  # rows of a procedural task

Row = tuple[str, str]  # prompt, answer


def sums(seed: int) -> list[Row]:
    """Return all 8,100 sums, in an order drawn from `seed`."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    return [(f"What is {a} + {b}?", str(a + b)) for a, b in pairs]


def reasoning_gym(seed: int) -> list[Row]:
    """Return rows of reasoning-gym's chain_sum, each prompt once."""
    from reasoning_gym import create_dataset

    sizes = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 2}
    drawn = create_dataset("chain_sum", size=PROCEDURAL, seed=seed, **sizes)
    return list({row["question"]: row["answer"] for row in drawn}.items())


TASKS = {"sums": sums, "reasoning_gym": reasoning_gym}


def make_task(directory: Path, task: str = "sums", seed: int = 1) -> None:
    """Write `heldout.jsonl` and `train.jsonl`, columns `prompt` and `answer`. The same seed gives the same bytes."""
    rows = TASKS[task](seed)
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in (("heldout", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        (directory / f"{name}.jsonl").write_text("".join(_lines(part)))


def _lines(rows: list[Row]) -> Iterator[str]:
    return (json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="output directory, created if missing")
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    make_task(arguments.directory, arguments.task, arguments.seed)


if __name__ == "__main__":
    main()
