"""The Python blocks of README.md run, on torch alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
# What `pip install .` does not bring is not there.
TORCH_ALONE = """
import sys
for name in ("yaml", "pydantic", "rich", "typer", "transformers", "megatron", "safetensors", "httpx", "jaxtyping"):
    sys.modules[name] = None
"""


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_there_is_a_block():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs_with_torch_alone_and_leaves_a_gradient(block):
    check = "\nassert logits.grad.shape == logits.shape and logits.grad.abs().sum() > 0\n"
    done = run(TORCH_ALONE + block + check)
    assert done.returncode == 0, done.stderr


def test_the_trainer_would_not_run_like_that():
    assert "ModuleNotFoundError" in run(TORCH_ALONE + "import dppo_megatron.config").stderr
