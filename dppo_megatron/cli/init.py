"""`dppo-megatron init`: creates a first project that runs on a CPU without changes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer

from dppo_megatron.common.files import output
from dppo_megatron.config import read_config
from dppo_megatron.errors import ExpectedError

from .arguments import echo_notes

app = typer.Typer()

CONFIG = """\
# A first run. You may replace everything in this directory; docs/settings.md lists all settings.
run:
  dir: {d}/run  # rollouts, checkpoints, logs, metrics; a new run needs a new directory
model:
  path: {d}/model  # yours: a Hugging Face directory of Qwen2.5, Qwen3, Llama 3, ...
  dtype: fp32  # bf16 for models of usual size
data:
  train: {d}/train.jsonl  # JSON lines or parquet, with the columns prompt and answer
  chat_template: true
  max_prompt_tokens: 128  # this model counts a character as a token
reward:
  name: {module}.reward:reward  # {d}/reward.py
rollout:
  prompts_per_step: 8
  group_size: 8  # answers to each prompt, which are compared with one another
  max_response_tokens: 24
optimizer:
  lr: 1e-3  # for random weights; 1e-6 for a language model
train:
  steps: 12
"""
REWARD = """\
def reward(prompt, response_text):  # prompt.answer, prompt.columns: the row of train.jsonl
    return sum(map(str.isdigit, response_text)) / max(len(response_text), 1)  # the share of digits, as an example
"""


@app.command()
def init(directory: Annotated[Path, typer.Argument(metavar="DIR", help="new, or empty")]) -> None:
    """Create a project that trains on a CPU: a commented config, prompts, a reward function and a tiny model."""
    from dppo_megatron.hf.small_model import chat_tokenizer, write_small_model
    from dppo_megatron.run.checks import preflight

    if not directory.parts or not all(map(str.isidentifier, directory.parts)):
        raise ExpectedError(
            f"DIR = {directory}: it becomes a Python package; use a relative path with names of letters, digits and _ "
            "that do not begin with a digit"
        )
    spec = importlib.util.find_spec(directory.parts[0])
    if spec and spec.origin and Path(spec.origin).parent != Path.cwd() / directory.parts[0]:
        raise ExpectedError(f"DIR = {directory}: Python has another module of this name; choose another")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ExpectedError(f"DIR = {directory}: already exists and is not an empty directory; choose another")
    output(directory, "DIR", directory=True)
    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(2, 10) for b in range(2, 10)]
    config_file = directory / "config.yaml"
    config_file.write_text(CONFIG.format(d=directory, module=".".join(directory.parts)))
    (directory / "reward.py").write_text(REWARD)
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_small_model(directory / "model", 1, chat_tokenizer())
    echo_notes(preflight(read_config(config_file), str(config_file)))
    typer.echo(f"{directory}: ready. Train it, one or two minutes without a GPU, then view its rollouts:")
    typer.echo(f"  dppo-megatron train {config_file}\n  dppo-megatron view {directory}/run --open")
