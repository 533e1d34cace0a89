"""The script for the day a GPU is at hand, where there is none: it says why, and its parts run on tiny shapes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.runs import environment

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_day.py"


def day(*arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device: `make test-gpu` runs all of it")
def test_without_a_gpu_every_part_says_why_it_is_skipped(tmp_path):
    found = day("--output", tmp_path)
    assert found.returncode == 0, found.stderr
    for part in ("correctness", "statistics", "kernels", "actor", "offload", "grpo", "colocated"):
        assert any(line.startswith(part) and "skipped: no CUDA device" in line for line in found.stdout.splitlines()), (
            part
        )
    assert not list(tmp_path.iterdir())


def test_no_part_starts_when_the_time_is_over(tmp_path):
    found = day("--device", "cpu", "--budget-s", "0", "--only", "actor", "offload", "--output", tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("skipped: 0 s are over") == 4  # as it comes, and in the table at the end


@pytest.mark.slow
def test_the_parts_that_train_run_on_tiny_shapes(tmp_path):
    found = day("--device", "cpu", "--only", "correctness", "actor", "offload", "grpo", "--output", tmp_path)
    assert found.returncode == 0, found.stdout
    (written,) = tmp_path.glob("*-cpu-dry-run-gpu-day.txt")
    text = written.read_text()
    assert text.count(" s  ok ") == 4, text
    for expected in ("date: ", "versions: Python", "tokens/s", "weights are the same, bit for bit", "dppo_topk_tv"):
        assert expected in text
