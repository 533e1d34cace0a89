"""Runs of the quickstart's task for benchmarks: one start policy, and configs that differ in the compared settings."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart"
sys.path.insert(0, str(EXAMPLE))

from make_task import make_task  # noqa: E402


def machine() -> str:
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def make_start_policy(root: Path, settings: list[str], seed: int = 1) -> None:
    """Create the task and the quickstart's start policy below `root`."""
    make_task(root / "task", seed=seed)
    start = [
        f"run.seed={seed}",
        f"model.path={root / 'task' / 'random_model'}",
        f"data.train={root / 'task' / 'warmup.jsonl'}",
        f"run.dir={root / 'warmup'}",
    ]
    train(EXAMPLE / "warmup.yaml", [*settings, *start])


def train_from_start(root: Path, run: Path, settings: list[str]) -> None:
    """Train from the start policy of `root`, with evaluation before and after. `settings` are values of --set."""
    train(
        EXAMPLE / "config.yaml",
        [
            f"run.dir={run}",
            f"model.path={root / 'warmup' / 'model'}",
            f"data.train={root / 'task' / 'train.jsonl'}",
            f"data.eval={root / 'task' / 'heldout.jsonl'}",
            "eval.every=0",
            "checkpoint.every=0",
            "tracking.tensorboard=false",
            *settings,
        ],
    )


def train(config: Path, settings: list[str]) -> None:
    command = [sys.executable, "-m", "dppo_megatron", "train", str(config)]
    for setting in settings:
        command += ["--set", setting]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        sys.exit(result.stdout)
