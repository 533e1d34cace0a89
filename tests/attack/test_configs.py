"""Configs and model directories changed at random: each is accepted, or refused in one short error, and soon."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dppo_megatron import cli
from tests.attack import cases, generator

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))
LONGEST_MESSAGE = 4096  # bytes
PLAN = ["plan", "--nodes", "1", "--gpus-per-node", "2", "--gpu", "cpu-16"]
LONGEST_CPU_S, LONGEST_WALL_S = 5.0, 30.0  # the latter for a machine that does something else, too


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


def run(*arguments: str) -> str:
    """What is wrong with the answer of `dppo-megatron ARGUMENTS`; empty for one that is as it should be."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["dppo-megatron", *arguments]
    started, cpu = time.monotonic(), time.process_time()
    code: Any = "returned"
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        return traceback.format_exc()[-3000:]
    finally:
        sys.argv = before
    wall, cpu = time.monotonic() - started, time.process_time() - cpu
    message = err.getvalue()
    size = len(message.encode())
    if wall > LONGEST_WALL_S or cpu > LONGEST_CPU_S:
        return f"took {wall:.1f} s, {cpu:.1f} s of them computing: {message[:500]}"
    if size > LONGEST_MESSAGE or "Traceback" in message + out.getvalue():
        return f"a message of {size} bytes: {message[:1000]}"
    if code in (0, "returned"):
        return ""
    return "" if code in (1, 2) and message.strip() else f"exit code {code} with {message[:500]!r}"


HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 10**6, 10**9, 10**21, -(10**21), 16**60, 0.0, -0.0, 0.5, 1e-300, 1e300, -1.5,
    float("inf"), float("-inf"), float("nan"), "", " ", "x", "1", "-1", "1e3", "1:30", "true", "null", "~", ".", "/",
    "/dev/null/x", "/proc/self/mem", "/dev/zero", "a\nb", "a\x00b", "\ud800", "\u202e\u200b", "é" * 300, "x" * 100_000,
    "../" * 2000, "%s%n{}{0}", "$(ls)", "json:loads", "json:", ":", "a:b:c", "absent:x", "tests:", "..:..", "..",
    "http://a:99999", "http://[::1", [], [[]], [None], [True], [1, "a"], ["x"] * 1000, {}, {"a": 1}, {1: 2}, {"": {}},
    [[[[[[[[]]]]]]]], {"a": {"b": {"c": {"d": {}}}}}, "2026-13-45", "2026-01-01", "0x10", "010",
]  # fmt: skip


def change_tree(tree: Any, at: random.Random) -> None:
    """One value, name or section somewhere in the tree."""
    parent = key = None
    node = tree
    while isinstance(node, (dict, list)) and node and (parent is None or at.random() < 0.8):
        parent, key = node, at.choice(list(node)) if isinstance(node, dict) else at.randrange(len(node))
        node = parent[key]
    if parent is None:
        return  # nothing to change
    kind = at.randrange(8)
    if kind <= 2:
        parent[key] = at.choice(HOSTILE)
    elif kind <= 5:
        parent[key] = at.choice([value for value in HOSTILE if type(value) is type(node)] or HOSTILE)
    elif kind == 6 and isinstance(parent, dict):
        letters = list(str(key) or "x")
        letters[at.randrange(len(letters))] = at.choice("xyz_.- \x07é")
        parent["".join(letters)] = parent.pop(key)
    elif at.random() < 0.5 and isinstance(parent, dict):
        parent.pop(key)
    elif isinstance(tree, dict):
        add_setting(tree, at)


def add_setting(tree: dict, at: random.Random) -> None:
    """A hostile value for a setting that exists."""
    from dppo_megatron.config import Config

    section = at.choice(list(Config.model_fields))
    setting = at.choice(list(Config.model_fields[section].annotation.model_fields))
    if not isinstance(tree.get(section), dict):
        tree[section] = {}
    usual = Config.model_fields[section].annotation.model_fields[setting].default
    alike = [value for value in HOSTILE if type(value) is type(usual)]
    tree[section][setting] = at.choice(alike if alike and at.random() < 0.7 else HOSTILE)


def change_text(content: bytes, at: random.Random) -> bytes:
    """Bytes flipped, cut, repeated or put in; the whole in another encoding."""
    where = at.randrange(len(content) + 1)
    kind = at.randrange(9)
    if kind == 0:
        return content[:where]
    if kind == 1:
        return content[:where] + bytes([at.randrange(256)]) + content[where + 1 :]
    if kind == 2:
        put = [
            b"\x00",
            b"\x1b[2J",
            b"\t",
            b"*",
            b"&a ",
            b"!!int ",
            b"<<: ",
            b"? ",
            b"\xff",
            b"\xed\xa0\x80",
            b"---\n",
            b"'",
            b"|",
        ]
        return content[:where] + at.choice(put) + content[where:]
    if kind == 3:
        lines = content.splitlines(keepends=True)
        return b"".join([*lines, at.choice(lines)]) if lines else content
    if kind == 4:
        return content.decode(errors="replace").encode(at.choice(["utf-16", "utf-32", "utf-8-sig", "utf-16-le"]))
    if kind == 5:
        depth = at.choice([40, 2000, 50_000])
        return content + b"\ndeep: " + b"[" * depth
    if kind == 6:
        levels = b"".join(b"b%d: &b%d [%s]\n" % (n, n, b", ".join([b"*b%d" % (n - 1)] * 9)) for n in range(1, 12))
        return content + b"\nb0: &b0 [x, x]\n" + levels
    if kind == 7:
        return content[where:] + content[:where]
    return content + b"\nlong: " + b"y" * at.choice([10_000, 250_000, 3_000_000])


def overrides(at: random.Random) -> list[str]:
    names = [
        "train.steps",
        "rollout",
        "optimizer.lr",
        "a" * 5000,
        ".",
        "..",
        "objective.settings.delta",
        "run.dir.x",
        "",
        "=",
        "é",
    ]
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
        change_tree(tree, at)
    content = yaml.safe_dump(tree, sort_keys=False).encode()
    for _ in range(at.choice([0, 0, 0, 1, 2])):
        content = change_text(content, at)
    path = root / "case.yaml"
    path.write_bytes(content)
    return [*at.choice([["validate"]] * 16 + [["slurm", "--dry-run"]] * 2 + [PLAN]), str(path), *overrides(at)]


@pytest.mark.slow
def test_every_changed_config_is_accepted_or_one_clear_error(workplace):
    failures = {}
    for number in range(cases(500)):
        arguments = config_case(number, workplace)
        if wrong := run(*arguments):
            failures[number] = f"{arguments}: {wrong}"
    report(failures)


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
    failures = {}
    for number in range(cases(100)):
        at = generator("model", number)
        model = workplace / "case_model"
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(workplace / "model", model)
        for _ in range(at.choice([1, 1, 1, 2])):
            damage(model, at)
        (workplace / "case.yaml").write_text(yaml.safe_dump(sound(workplace, model)))
        if wrong := run(*at.choice([["validate"]] * 9 + [PLAN]), str(workplace / "case.yaml")):
            failures[number] = wrong
    report(failures)


def report(failures: dict[int, str]) -> None:
    assert not failures, f"{len(failures)} cases, the first ones:\n" + "\n".join(
        f"--- {number}: {wrong}" for number, wrong in list(failures.items())[:8]
    )
