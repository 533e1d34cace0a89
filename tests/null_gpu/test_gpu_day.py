"""The script for the day a GPU is at hand runs through on device cuda; its file cannot be taken for a measurement."""

import os
import subprocess
import sys
from pathlib import Path

from tests.null_gpu.vllm_config import ROOT

# Not cp2, dp2, pp2: the same code with other settings. The stand-ins for TransformerEngine have no context parallelism.
PARTS = ("actor", "moe", "offload", "grpo", "tp2", "ep2")


def test_gpu_day_runs_on_device_cuda(tmp_path):
    script = [str(Path(__file__).with_name("gpu_day.py")), "--device", "cuda", "--devices", "2"]
    done = subprocess.run(
        [sys.executable, *script, "--only", *PARTS, "--output", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NULL_GPU_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.iterdir()
    text = result.read_text()
    assert "null-device" in result.name
    assert "null device" in text
    assert text.count("  ok  ") == len(PARTS)
    assert text.count("the loss never waited for the device") >= 3  # actor and both layouts
    assert text.count("log-probs: mean difference") == 4  # both layouts in fp32 and bf16
    for expected in (
        *("transformer_engine, fp8 none: ", "weights are the same, bit for bit", "dppo_topk_tv"),
        *("tensor 2 + sequence, bf16", "expert 2, fp32", "of them the one nearest to its bound"),
    ):
        assert expected in text, expected
