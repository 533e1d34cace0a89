"""The Python blocks of README.md run, on torch alone; that of CONTRIBUTING.md is a reward."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dppo_megatron.rewards.registry import load_reward
from dppo_megatron.types import Prompt

ROOT = Path(__file__).parents[2]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


BLOCKS = python_blocks("README.md")
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


def test_the_reward_of_contributing_is_one(tmp_path, monkeypatch):
    (block,) = python_blocks("CONTRIBUTING.md")
    (tmp_path / "my_reward.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    prompt = Prompt(position=0, row=0, token_ids=np.zeros(1, np.int32), text="2+2=", answer="4")
    reward = load_reward("my_reward:reward")
    assert (reward(prompt, " 4\n"), reward(prompt, "5")) == (1.0, 0.0)
