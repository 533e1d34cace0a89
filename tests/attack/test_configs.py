"""Configs and model directories changed at random: each is accepted, or refused in one short error, and soon."""

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.attack import generator
from tests.attack.commands import attack, run
from tests.attack.hostile_values import HOSTILE, change_text, change_tree

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))
PLAN = ["plan", "--nodes", "1", "--gpus-per-node", "2", "--gpu", "cpu-16"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Iterator[Path]:
    """A valid config with a tiny model and one prompt: `config.yaml` there is accepted."""
    from make_task import write_random_model

    root = tmp_path_factory.mktemp("attack")
    write_random_model(root / "model", seed=1)
    (root / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (root / "config.yaml").write_text(yaml.safe_dump(sound(root, root / "model")))
    with contextlib.chdir(root):
        assert run("validate", "config.yaml") == ""
        yield root


def sound(root: Path, model: Path) -> dict[str, Any]:
    return {
        "run": {"dir": str(root / "run")},
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"train": str(root / "prompts.jsonl"), "max_prompt_tokens": 16},
        "train": {"steps": 1},
        "objective": {"name": "dppo_topk_tv", "settings": {"delta": 0.2}},
        "reward": {"name": "arithmetic"},
        "rollout": {"max_response_tokens": 4, "topk_logprobs": 4, "stop_token_ids": [3]},
        "engine": {"max_model_len": 64, "urls": ["http://127.0.0.1:9"]},
        "slurm": {"gpus_per_node": 0},
    }


def add_setting(tree: dict, at: random.Random) -> None:
    """A hostile value for a setting that exists."""
    from dppo_megatron.config import Config

    section = at.choice(list(Config.model_fields))
    setting = at.choice(list(Config.model_fields[section].annotation.model_fields))
    if not isinstance(tree.get(section), dict):
        tree[section] = {}
    usual = Config.model_fields[section].annotation.model_fields[setting].default
    alike = [value for value in HOSTILE if type(value) is type(usual)]
    tree[section][setting] = deepcopy(at.choice(alike if alike and at.random() < 0.7 else HOSTILE))


def overrides(at: random.Random) -> list[str]:
    names = ["train.steps", "rollout", "optimizer.lr", "objective.settings.delta", "run.dir.x"]
    names += ["a" * 5000, ".", "..", "", "=", "é"]
    given = []
    for _ in range(at.choice([0, 0, 0, 1, 2])):
        value = at.choice(HOSTILE)
        if isinstance(value, str) and ("\x00" in value or "\ud800" in value):
            continue  # no command line holds them
        given += ["--set", f"{at.choice(names)}={value}"[:50_000]]
    return given


def config_case(number: int, root: Path) -> list[str]:
    """Writes the config of a case; returns the command line."""
    at = generator("config", number)
    tree = yaml.safe_load((at.choice(EXAMPLES) if at.random() < 0.3 else root / "config.yaml").read_text())
    for _ in range(at.choice([0, 1, 1, 1, 2, 3])):
        change_tree(tree, at, add_setting)
    content = yaml.safe_dump(tree, sort_keys=False).encode()
    for _ in range(at.choice([0, 0, 0, 1, 2])):
        content = change_text(content, at)
    path = root / "case.yaml"
    path.write_bytes(content)
    return [*at.choice([["validate"]] * 16 + [["slurm", "--dry-run"]] * 2 + [PLAN]), str(path), *overrides(at)]


@pytest.mark.slow
def test_every_changed_config_is_accepted_or_one_clear_error(workplace):
    def case(number: int) -> str:
        arguments = config_case(number, workplace)
        return (wrong := run(*arguments)) and f"{arguments}: {wrong}"

    attack(500, case)


def damage(model: Path, at: random.Random) -> None:
    """One file of a model directory, changed at random."""
    file = at.choice(sorted(file for file in model.iterdir() if file.is_file()))
    content = file.read_bytes()
    kind = at.randrange(8)
    if kind == 0:
        file.unlink()
    elif kind == 1:
        file.write_bytes(content[: at.randrange(len(content) + 1)])
    elif kind == 2:
        where = at.randrange(min(len(content), 4000) + 1)  # the header of weights, the head of text
        file.write_bytes(content[:where] + bytes([at.randrange(256)]) + content[where + 1 :])
    elif kind == 3:
        whole = [b"", b"null", b"[]", b"7", b'"x"', b"{}", b"[" * 100_000, b"\xff\xfe{}", b"version https://git-lfs\n"]
        file.write_bytes(at.choice(whole))
    else:
        size = 8 + int.from_bytes(content[:8], "little") if file.suffix == ".safetensors" else len(content)
        text = content[8:size] if file.suffix == ".safetensors" else content
        with contextlib.suppress(ValueError, RecursionError):  # damaged before
            tree = json.loads(text)
            change_tree(tree, at)
            changed = json.dumps(tree).encode()
            length = len(changed).to_bytes(8, "little") if file.suffix == ".safetensors" else b""
            file.write_bytes(length + changed + content[size:])


@pytest.mark.slow
def test_every_damaged_model_directory_is_accepted_or_one_clear_error(workplace):
    def case(number: int) -> str:
        at = generator("model", number)
        model = workplace / "case_model"
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(workplace / "model", model)
        for _ in range(at.choice([1, 1, 1, 2])):
            damage(model, at)
        (workplace / "case.yaml").write_text(yaml.safe_dump(sound(workplace, model)))
        return run(*at.choice([["validate"]] * 9 + [PLAN]), str(workplace / "case.yaml"))

    attack(100, case)
