"""The Python blocks of README.md run, on torch alone; those of docs/adding.md are an objective and a reward."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dppo_megatron.objectives import build_objective
from dppo_megatron.rollout.rewards.registry import load_reward
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
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_there_is_a_block():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs_with_only_torch_and_leaves_a_gradient(block):
    check = "\nassert logits.grad.shape == logits.shape and logits.grad.abs().sum() > 0\n"
    done = run(TORCH_ALONE + block + check)
    assert done.returncode == 0, done.stderr


def test_the_trainer_would_not_run_like_that():
    assert "ModuleNotFoundError" in run(TORCH_ALONE + "import dppo_megatron.config").stderr


def test_the_reward_of_the_page_is_one(tmp_path, monkeypatch):
    (block,) = (block for block in python_blocks("docs/adding.md") if "def reward(" in block)
    (tmp_path / "my_reward.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    prompt = Prompt(position=0, row=0, token_ids=np.zeros(1, np.int32), text="2+2=", answer="4")
    reward = load_reward("my_reward:reward")
    assert (reward(prompt, " 4\n"), reward(prompt, "5")) == (1.0, 0.0)


def own_objective(tmp_path, monkeypatch, name: str):
    (block,) = (
        block for block in python_blocks("docs/adding.md") if f"# objective.name: your_module:{name}\n" in block
    )
    (tmp_path / "my_objective.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_objective", raising=False)
    return build_objective(f"my_objective:{name}")


def given(logprob: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "logprob": logprob,
        "rollout_logprob": logprob.detach(),
        "advantage": torch.tensor([1.0, -1.0, 1.0]),
        "mask": torch.tensor([True, True, False]),
    }


def test_the_objective_of_the_page_is_one(tmp_path, monkeypatch):
    objective = own_objective(tmp_path, monkeypatch, "reinforce")
    logprob = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    objective(**given(logprob)).loss.sum().backward()
    assert logprob.grad.tolist() == [-1.0, 1.0, 0.0]
    assert objective.describe() == "objective reinforce: -A ln pi(a)"


def test_the_objective_of_the_page_reads_its_column(tmp_path, monkeypatch):
    objective = own_objective(tmp_path, monkeypatch, "compared")
    logprob = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    second = torch.tensor([-1.5, -2.0, float("nan")])
    objective(second_logprob=second, **given(logprob)).loss.sum().backward()
    assert logprob.grad.tolist() == [-1.0 + 2 * 0.5, 1.0, 0.0]
