"""A policy learns to use a tool: it adds three numbers in three turns, by asking a calculator twice.

    python examples/calculator/run.py

The start policy is pretrained on text in which two of three answers are guesses; the others ask the calculator.
Therefore a third of its samples is right. The reward checks the sum, and DPPO teaches the policy to ask every time.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "quickstart"))

from make_task import VOCABULARY, write_random_model  # noqa: E402

from dppo_megatron.common.process import with_this_process  # noqa: E402
from dppo_megatron.report.tail import read_records  # noqa: E402

ROOT = Path("runs/calculator")
TARGET = 0.85
PROMPTS, HELD_OUT, GUESSES = 8000, 200, 2


def make_task(directory: Path, seed: int) -> None:
    """Write prompts, the text of the start policy and a random model. The same seed gives the same bytes."""
    generator = random.Random(seed)
    directory.mkdir(parents=True)
    sums = {tuple(generator.randrange(10, 100) for _ in range(3)) for _ in range(PROMPTS + HELD_OUT)}
    sums = sorted(sums)
    generator.shuffle(sums)
    text = []
    for a, b, c in sums[HELD_OUT:]:
        asked = f"{a}+{b}?{a + b};{a + b}+{c}?{a + b + c};{a + b + c}"
        text += [(a, b, c, asked), *((a, b, c, str(generator.randrange(30, 298))) for _ in range(GUESSES))]
    generator.shuffle(text)
    right = [(*numbers, str(sum(numbers))) for numbers in sums]
    for name, rows in (("heldout", right[:HELD_OUT]), ("train", right[HELD_OUT:]), ("warmup", text)):
        lines = (json.dumps({"prompt": f"{a}+{b}+{c}=", "answer": answer}) for a, b, c, answer in rows)
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    write_random_model(directory / "random_model", seed, (*VOCABULARY, "?", ";"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of the task, the start policy and the run")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="passed to the DPPO run")
    parser.add_argument("--warmup-set", action="append", default=[], metavar="A.B=VALUE", help="passed to the warm-up")
    arguments = parser.parse_args()
    started = time.monotonic()
    shutil.rmtree(ROOT, ignore_errors=True)
    make_task(ROOT / "task", arguments.seed)
    for config, changes in (("warmup.yaml", arguments.warmup_set), ("config.yaml", arguments.set)):
        print(f"== {config}", flush=True)
        command = [sys.executable, "-m", "dppo_megatron", "train", str(HERE / config)]
        changes = [word for change in (f"run.seed={arguments.seed}", *changes) for word in ("--set", change)]
        if code := subprocess.run([*command, *changes], preexec_fn=with_this_process()).returncode:
            return code
    records = read_records(ROOT / "dppo/metrics.jsonl")
    shares = [r["rollout/reward_mean"] for r in records if "rollout/reward_mean" in r]
    before, after = shares[0], shares[-1]
    minutes = (time.monotonic() - started) / 60
    print(f"right answers, sampled: {before:.1%} before, {after:.1%} after ({minutes:.1f} minutes in all)")
    return 0 if after >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
