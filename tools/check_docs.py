"""Check names in the documentation: `python tools/check_docs.py` prints the ones that do not exist and exits with 1.

In README.md, CONTRIBUTING.md, tests/README.md, docs/ and examples/ it resolves
- links and pictures inside the repository, with their headings,
- files named in code (`convert/job.py`), names after them (`convert/job.py: Conversion`), and tests in commands,
- commands (`dppo-megatron X`), their flags, and targets of make,
- metrics (`eval/accuracy`), by the table in `report/names.py`,
- settings (`rollout.max_staleness`, `--set`, YAML blocks), by the schema of the config,
- docs/settings.md and the table of methods, which `tools/tables.py` writes from the code,
- figures: every number of the paragraph or table below `<!-- figures: FILE -->` is a rounded number of
  benchmarks/results/FILE.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import tables
import typer
import yaml
from pydantic import BaseModel

from dppo_megatron.cli import app
from dppo_megatron.config.schema import Config
from dppo_megatron.report.names import METRICS

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
NUMBER = re.compile(r"(?<![\w.-])(?:\d[\d,]*)?\.?\d+(?:e-?\d+)?(?![\w.]*\w)")
NOT_SETTINGS = re.compile(r"\.(py|md|yaml|json|jsonl|png|safetensors|log|sbatch|lock|txt)$")
METRIC_NAMES = {metric.name for metric in METRICS}
METRIC_GROUPS = {name.split("/")[0] for name in METRIC_NAMES}
NO_FILES = ("report/report.md", "test_x.py", "x.py")  # files of a run, and placeholders
OF_OTHERS = ("--dist-ckpt-strictness", "--api-key", "--shm-size")  # flags of other programs
OF_CONTAINERS = ("--build-arg", "--cleanenv", "--containall", "--container-env", "--env", "--gpus", "--ipc", "--ulimit")
REFUTED = ("rollout.engine",)  # settings that the text names as missing


def pages(root: Path) -> list[Path]:
    folders = [root / "docs", root / "examples"]
    single = [root / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md")]
    return [*single, *(f for d in folders for f in sorted(d.glob("*.md")))]


def check_page(root: Path, page: Path) -> Iterator[str]:
    text = page.read_text()
    blocks = FENCE.findall(text)
    prose = FENCE.sub("", text)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    code = [*spans, *(line for _, body in blocks for line in body.replace("\\\n", " ").splitlines())]
    yield from _links(root, page, prose)
    for span in spans:
        yield from _file(root, page, span)
    for line in code:
        yield from _command(root, line)
        for path in re.findall(r"(?<![\w/.-])tests/[a-z\d_/]+(?:\.\w+)?", line):
            if not (root / path).exists() and not path.endswith(NO_FILES):
                yield f"{path}: no such file"
    for span in spans:
        yield from _setting(span)
        yield from _metric(span)
    for language, body in blocks:
        if language == "yaml":
            yield from _yaml(body)
    yield from _figures(root, text)


def _links(root: Path, page: Path, prose: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists():
            yield f"link to {target}: no such file"
        elif heading and heading not in _headings(found):
            yield f"link to {target}: no such heading"


@cache
def _headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _file(root: Path, page: Path, span: str) -> Iterator[str]:
    match = re.fullmatch(r"(?:python )?([\w./-]+\.(?:py|md|sbatch|lock|svg))(?:: ([\w.]+))?", span)
    if not match or "your_" in span or span in NO_FILES:
        return
    path, name = match.groups()
    bases = [root, root / "dppo_megatron", page.parent]
    found = next((base / path for base in bases if (base / path).is_file()), None)
    if "/" not in path:  # the sentence gives its folder, as in "the conftest.py of tests/rollout/engines"
        found = found or next((f for d in ("dppo_megatron", "tests", "slurm") for f in (root / d).rglob(path)), None)
    if found is None:
        yield f"{path}: no such file"
    elif name and name not in _names(found):
        yield f"{path} has no {name}"


@cache
def _names(file: Path) -> set[str]:
    names = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                names.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    visit(ast.parse(file.read_text()), "")
    return names


def _command(root: Path, line: str) -> Iterator[str]:
    for target in re.findall(r"(?:^|&& )make ([a-z][a-z-]+)", line):
        if not re.search(rf"^{target}:", (root / "Makefile").read_text(), re.MULTILINE):
            yield f"make {target}: no such target"
    for script in re.findall(r"python[\d.]* ([\w./-]+\.py) ", line):
        if not (root / script).is_file():
            yield f"python {script}: no such file"
    match = re.search(r"(?:dppo-megatron|python3? -m dppo_megatron) +(.*)", line.split("  #")[0])
    if match:
        yield from _words_of_command(match[1].split())
        yield from (f"--set {key}: no such setting" for key in re.findall(r"--set '?([\w.]+)=", line) if _unknown(key))
    elif line.startswith("--"):
        for flag in FLAG.findall(line):
            if flag not in _all_flags() | _flags_in_sources(root) | {*OF_OTHERS, *OF_CONTAINERS}:
                yield f"{flag}: no command has it"


def _words_of_command(words: list[str]) -> Iterator[str]:
    """Check a command and its flags. words: the command line after `dppo-megatron`."""
    command: Any = typer.main.get_command(app)
    if words[1:2] == ["/"]:  # `trainer / orchestrator / engine CONFIG`
        yield from (f"dppo-megatron {word}: no such command" for word in words[:-1:2] if word not in command.commands)
        return
    path, rest = "dppo-megatron", list(words)
    while rest and hasattr(command, "commands") and re.fullmatch(r"[a-z][\w-]*", rest[0]):
        path += f" {rest[0]}"
        if rest[0] not in command.commands:
            yield f"{path}: no such command"
            return
        command = command.commands[rest.pop(0)]
    if not hasattr(command, "commands"):
        known = {"--help", *(flag for option in command.params for flag in option.opts)}
        yield from (f"{path} {flag}: no such flag" for flag in FLAG.findall(" ".join(rest)) if flag not in known)


@cache
def _all_flags() -> frozenset[str]:
    def of(command: Any) -> Iterator[str]:
        yield from (flag for option in command.params for flag in option.opts)
        for sub in getattr(command, "commands", {}).values():
            yield from of(sub)

    return frozenset(of(typer.main.get_command(app)))


@cache
def _flags_in_sources(root: Path) -> frozenset[str]:
    """Return the flags of scripts and of the programs that our code starts."""
    folders = ("dppo_megatron", "examples", "benchmarks", "tools", "slurm", "containers")
    files = [f for d in folders for f in (root / d).rglob("*") if f.suffix in (".py", ".sbatch", ".j2", ".sh")]
    return frozenset(flag for file in files for flag in FLAG.findall(file.read_text()))


def _unknown(key: str) -> bool:
    """Return whether the schema lacks a dotted setting. Every key below a free-form mapping exists."""
    model: Any = Config
    for part in key.split("."):
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return False
        if part not in model.model_fields:
            return True
        model = model.model_fields[part].annotation
    return False


def _setting(span: str) -> Iterator[str]:
    for key in re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-z_0-9]+)+)(?=$|[ :=,<>])", span):
        is_setting = key.split(".")[0] in Config.model_fields and not NOT_SETTINGS.search(key) and key not in REFUTED
        if is_setting and _unknown(key):
            yield f"{key}: no such setting"


def _metric(span: str) -> Iterator[str]:
    group, _, name = span.partition("/")
    if group in METRIC_GROUPS and re.fullmatch(r"[a-z_]+", name) and span not in METRIC_NAMES:
        yield f"{span}: no such metric"


def _yaml(body: str) -> Iterator[str]:
    try:
        tree = yaml.safe_load(body)
    except yaml.YAMLError as error:
        yield f"YAML block: {error}"
        return
    for section, settings in (tree or {}).items():
        for key in settings if isinstance(settings, dict) else ():
            if _unknown(f"{section}.{key}"):
                yield f"YAML block: {section}.{key}: no such setting"


def _figures(root: Path, text: str) -> Iterator[str]:
    for name in re.findall(r"benchmarks/results/([\w.-]+\w)", text):
        if not (root / "benchmarks" / "results" / name).exists():
            yield f"benchmarks/results/{name}: no such file"
    for name, paragraph in re.findall(r"<!-- figures: (\S+) -->\n(.*?)(?:\n\n|\Z)", text, re.DOTALL):
        file = root / "benchmarks" / "results" / name
        if not file.exists():
            yield f"figures of benchmarks/results/{name}: no such file"
            continue
        measured = [_value(number) for number in NUMBER.findall(file.read_text())]
        for number in NUMBER.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", "", paragraph)):
            if not any(abs(value - _value(number)) <= _half_a_digit(number) for value in measured):
                yield f"{number}: nothing in benchmarks/results/{name} rounds to it"


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _half_a_digit(number: str) -> float:
    """Return half of the last written digit, the largest error of rounding."""
    mantissa, _, exponent = number.partition("e")
    return 0.5001 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def main(root: Path) -> int:
    found = [f"{page.relative_to(root)}: {problem}" for page in pages(root) for problem in check_page(root, page)]
    found += tables.stale(root)
    print("\n".join(found) or "docs: every link, file, command, flag, setting and figure named there exists")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
