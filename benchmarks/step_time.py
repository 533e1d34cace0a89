"""Measure the overhead of a step: time that is not generation, forward, backward, optimizer or loading weights.

    make quickstart && python benchmarks/step_time.py runs/quickstart/dppo

Reads the records of a run that sampled synchronously (rollout.max_staleness 0) and prints the parts of the mean and the
median step. Generation is the orchestrator's time from the first request of a step to its last group. Evaluation, which
generates for held-out prompts, comes before it. The rest of the trainer's wait is hand-over. Exits with 1 if the
overhead is above the limit.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median

from dppo_megatron.report.tail import read_records

LIMIT = 0.10
WORK = ("generation", "evaluation", "forward and backward", "optimizer", "engines load weights")


def step_parts(record: dict[str, float], generate_s: float, eval_s: float) -> dict[str, float]:
    """Return the seconds of every part of one step; they add up to the step."""
    parts = {
        "generation": generate_s,
        "evaluation": eval_s,
        "forward and backward": record["time/forward_backward_s"],
        "optimizer": record["time/optimizer_s"],
        "engines load weights": record["time/publish_load_s"],
        "hand-over of rollouts": record["time/wait_s"] - generate_s - eval_s,
        "read and pack": record["time/read_s"],
        "export weights": record["time/publish_export_s"],
        "weight check": record["time/publish_probe_s"],
        "checkpoint": record.get("time/checkpoint_s", 0.0),
    }
    return {**parts, "other": record["time/step_s"] - sum(parts.values())}


def read_steps(run: Path) -> list[dict[str, float]]:
    records = read_records(run / "metrics.jsonl")
    generated = {r["step"]: r["time/generate_s"] for r in records if "time/generate_s" in r}
    trained = [r for r in records if "time/forward_backward_s" in r and r["step"] in generated]
    if not trained:
        sys.exit(f"{run}: has no step that was sampled and trained; run `make quickstart` first")
    # The policy of version v is evaluated while the trainer waits for the batch of step v + 1.
    evaluated = {r["step"] + 1: r["time/eval_s"] for r in records if "time/eval_s" in r}
    return [step_parts(r, generated[r["step"]], evaluated.get(r["step"], 0.0)) for r in trained]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/quickstart/dppo"))
    run = parser.parse_args().run
    steps = read_steps(run)
    total = mean(sum(parts.values()) for parts in steps)
    print(f"{run}: {len(steps)} steps; {platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
          f"torch {version('torch')}, megatron-core {version('megatron-core')}")  # fmt: skip
    print(f"{'part':<24}{'mean s':>10}{'median s':>10}{'share':>8}")
    for name in steps[0]:
        values = [parts[name] for parts in steps]
        print(f"{name:<24}{mean(values):>10.3f}{median(values):>10.3f}{mean(values) / total:>8.1%}")
    print(f"{'step':<24}{total:>10.3f}{median(sum(parts.values()) for parts in steps):>10.3f}{1:>8.0%}")
    overhead = 1 - sum(mean(parts[name] for parts in steps) for name in WORK) / total
    print(f"overhead (all but {', '.join(WORK)}): {overhead:.1%}, limit {LIMIT:.0%}")
    return int(overhead > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
