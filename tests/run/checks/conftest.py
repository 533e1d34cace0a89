"""The quickstart's task, and a valid config for it."""

import json
import shutil
from pathlib import Path

import pytest

from dppo_megatron.config import Config, ConfigError
from dppo_megatron.run.checks import preflight


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    from make_task import make_task

    directory = tmp_path_factory.mktemp("task")
    make_task(directory)
    return directory


@pytest.fixture
def tree(task, tmp_path) -> dict:
    return {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(task / "random_model"), "dtype": "fp32"},
        "data": {"train": str(task / "train.jsonl"), "eval": str(task / "heldout.jsonl"), "max_prompt_tokens": 16},
        "train": {"steps": 1},
        "rollout": {"max_response_tokens": 4},
        "engine": {"max_model_len": 64},
    }


def errors(tree: dict, place: str = "run") -> str:
    """Return the problems for which the preflight rejects a config, one line each."""
    with pytest.raises(ConfigError) as raised:
        preflight(Config.model_validate(tree), "config.yaml", place=place)
    return "\n".join(raised.value.violations)


def changed_model(task: Path, directory: Path, **settings: object) -> str:
    """Return the path of a copy of the task's model with other settings in its config.json."""
    model = shutil.copytree(task / "random_model", directory)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | settings))
    return str(model)
