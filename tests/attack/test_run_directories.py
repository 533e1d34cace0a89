"""Files of a run damaged at random: every reader answers, or names the file in one short error."""

import contextlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.attack import generator
from tests.attack.commands import attack, run
from tests.attack.hostile_values import HOSTILE, change_text, change_tree
from tests.attack.test_configs import sound

BEFORE = Path(__file__).parents[1] / "data" / "run_before" / "run"  # written by an earlier version
NOW = 1_795_321_946.0


def lines(*records: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Iterator[Path]:
    """`RUN` there is a run of which every file is sound; `prompts.jsonl` are its prompts."""
    root = tmp_path_factory.mktemp("runs")
    shutil.copytree(BEFORE, root / "RUN")
    write_state(root / "RUN", root)
    (root / "prompts.jsonl").write_bytes(lines(*({"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(9))))
    with contextlib.chdir(root):
        for command in COMMANDS.values():
            assert run(*(part.replace("case", "RUN") for part in command)) == ""
        yield root


def write_state(directory: Path, root: Path) -> None:
    """Write the other files of a running attempt under Slurm."""
    config = sound(root, directory / "model") | {"run": {"dir": str(directory)}, "train": {"steps": 3}}
    config["engine"] = {"max_model_len": 64}
    attempt = {"time": NOW, "job": "7", "restart": 0, "event": "started", "cause": "submitted", "step": None}
    policy = {"version": 2, "path": "x", "published_at": NOW, "confirmed": {"http://127.0.0.1:9": "a"}}
    engine = {"name": "engine-0", "url": "http://127.0.0.1:9", "pid": 1, "host": ""}
    for name, content in {
        "config.yaml": yaml.safe_dump(config).encode(),
        "restarts.jsonl": lines({**attempt, "nodes": ["a", "b"]}, {**attempt, "restart": 1, "nodes": []}),
        "weights/published.json": json.dumps({**policy, "probe_tokens": [1, 2], "probe_logprobs": [-0.5]}).encode(),
        "services/engine-0.json": json.dumps(engine).encode(),
        "logs/engine-0.log": b"INFO fine\nx ERROR y: it broke\n",
    }.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)


def damage(file: Path, at: random.Random) -> str:
    """Change a file, or put something else in its place; return the kind of damage."""
    content = file.read_bytes()
    kind = at.randrange(12)
    if kind <= 1:
        file.write_bytes(change_text(content, at))
        return "text"
    if kind == 2:
        file.write_bytes(
            at.choice([b"", b"\n", b"null", b"[]\n", b"7\n", b'"x"', b"{}\n", b"\xff\xfe{}", b"[" * 10**5])
        )
        return "whole"
    if kind == 3:
        file.write_bytes(at.randbytes(at.choice([1, 100, 300_000])))
        return "binary"
    if kind == 4:
        file.unlink()
        if at.random() < 0.5:
            file.mkdir()
        elif at.random() < 0.5 and file.parent.name != "bank":  # readers of a bank wait for a pipe's writer
            os.mkfifo(file)
        else:
            file.symlink_to(at.choice(["/dev/zero", file.name, "/nowhere/x"]))
        return "no file"
    if kind == 5:
        file.write_bytes(content + at.choice(["9" * 5000, "x" * 3_000_000, "\x1b]0;t\x07 ERROR " * 9]).encode())
        return "more"
    with contextlib.suppress(ValueError, RecursionError, yaml.YAMLError, IndexError, AssertionError):  # damaged before
        if file.suffix == ".yaml":
            tree = yaml.safe_load(content)
            change_tree(tree, at)
            file.write_text(yaml.safe_dump(tree))
        else:
            changed = content.splitlines()
            where = at.randrange(len(changed) or 1)
            tree = json.loads(changed[where])
            assert isinstance(tree, dict)
            change_tree(tree, at)
            if at.random() < 0.3:
                tree[at.choice(["step", "time", "time/step_s", "train/loss", "eval/accuracy"])] = at.choice(HOSTILE)
            changed[where] = json.dumps(tree).encode()
            file.write_bytes(b"\n".join(changed) + b"\n")
    return "value"


def damaged_copy(kind: str, number: int, root: Path) -> str:
    """Make `case`, a damaged copy of the run; return the damage."""
    at = generator(kind, number)
    case = root / "case"
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(root / "RUN", case)
    done = []
    for _ in range(at.choice([1, 1, 1, 2, 3])):
        file = at.choice(sorted(path for path in case.rglob("*") if path.is_file() and small(path)))
        done.append(f"{damage(file, at)} of {file.relative_to(case)}")
    return ", ".join(done)


def small(path: Path) -> bool:
    """State and metrics; damaged weights and shards have tests of their own."""
    return path.suffix in (".json", ".jsonl", ".yaml", ".log") or path.name == "latest"


COMMANDS = {
    "status": ["status", "case"],
    "doctor": ["doctor", "case"],
    "status as JSON": ["status", "case", "--json"],
    "report": ["report", "case"],
    "report of two": ["report", "case", "RUN", "--out", "out"],
    "view": ["view", "case", "--out", "view.html"],
    "view of two": ["view", "case", "RUN", "--out", "view.html"],
    "resume": ["slurm", "case/config.yaml", "--dry-run", "--resume"],
    "convert": ["convert", "megatron-to-hf", "case", "model", "--dry-run"],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.slow
def test_every_damaged_run_is_shown_or_one_clear_error(workplace, name):
    def case(number: int) -> str:
        done = damaged_copy(name, number, workplace)
        return (wrong := run(*COMMANDS[name])) and f"{done}: {wrong}"

    attack(8 if "report" in name else 40, case)


def damaged_prompts(number: int, root: Path) -> str:
    at = generator("inspect", number)
    shutil.rmtree(root / "case", ignore_errors=True)
    (root / "case").mkdir()
    shutil.copy(root / "prompts.jsonl", root / "case")
    return damage(root / "case" / "prompts.jsonl", at)


@pytest.mark.slow
def test_every_damaged_file_of_prompts_is_inspected_or_one_clear_error(workplace):
    options = [[], ["--config", "RUN/config.yaml"], ["--reward", "math"], ["--prompt-column", "\x1b"]]

    def case(number: int) -> str:
        done = damaged_prompts(number, workplace)
        wrong = run("data", "inspect", "case/prompts.jsonl", *options[number % len(options)])
        return wrong and f"{done}: {wrong}"

    attack(60, case)
