"""The script for the day a GPU is at hand runs through on device cuda; its file cannot be taken for a measurement."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.null_gpu.vllm_config import ROOT

PARTS = ("actor", "offload", "grpo")


@pytest.mark.timeout(400)
def test_gpu_day_runs_on_device_cuda(tmp_path):
    command = ["-m", "tests.null_gpu.gpu_day", "--device", "cuda", "--only", *PARTS, "--output", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=380)
    (result,) = tmp_path.iterdir()
    text = result.read_text()
    assert done.returncode == 0, text
    assert "null-device" in result.name
    assert "null device" in text
    assert text.count("  ok  ") == len(PARTS)
    assert "the loss never waited for the device" in text
    assert "transformer_engine: " in text
