"""The rules of the house: how long a file and the core may be, names that exist, modules that something uses.

CONTRIBUTING.md states the rules. The layers of imports are in pyproject.toml, and `make lint` checks them with
import-linter. Every rule here is also run against a small tree of files that breaks it.
"""

from __future__ import annotations

import ast
import io
import re
import shutil
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "dppo_megatron"
RULES = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
FILE_LINES = int(re.search(r"No file has more than (\d+) lines", RULES)[1])
CORE_LINES = int((ROOT / "tests/house/core_lines.txt").read_text())
OUTSIDE_THE_CORE = ("lab", "integrations")
SCRIPTS = ("benchmarks", "examples", "tools", "docs")
SOURCES = ("dppo_megatron", "tests", "tools", "examples", "benchmarks", "docs", "setup.py")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def module_files(root: Path) -> dict[str, Path]:
    files = sorted((root / PACKAGE).rglob("*.py"))
    named = ((file.parent if file.name == "__init__.py" else file.with_suffix(""), file) for file in files)
    return {".".join(path.relative_to(root).parts): file for path, file in named}


def imports(root: Path) -> dict[str, set[str]]:
    """Module -> the package's modules it imports, wherever in the file, under TYPE_CHECKING too."""
    files = module_files(root)
    return {
        module: {name for name in _imported(module, file, files) if name != module} for module, file in files.items()
    }


def _imported(module: str, file: Path, files: Mapping[str, Path]) -> Iterator[str]:
    folder = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            base = folder.split(".")[: len(folder.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            if source.split(".")[0] == PACKAGE:
                for alias in node.names:
                    name = f"{source}.{alias.name}"
                    yield name if name in files else source


def unresolved_imports(root: Path) -> list[str]:
    """Names of the package that scripts outside it import and that are not there."""
    files, wrong = module_files(root), []
    for script in (file for folder in SCRIPTS for file in sorted((root / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                names = [a.name for a in node.names if f"{node.module}.{a.name}" not in files]
                text = _text(node.module, files)
                lost = [name for name in names if not re.search(rf"\b{name}\b", text)]
                wrong += [f"{script.relative_to(root)}: {node.module} has no {name}" for name in lost]
    return wrong


def unused_modules(root: Path) -> list[str]:
    """Modules that no other imports and that no other file, of code or of settings, names by their dotted name."""
    files = module_files(root)
    used = set().union(*imports(root).values()) | {f"{PACKAGE}.__main__"}
    texts = [
        f.read_text() for s in (*SOURCES, "Makefile") for f in [root / s, *(root / s).rglob("*.py")] if f.is_file()
    ]
    return [
        module
        for module, file in files.items()
        if file.name not in ("__init__.py", "sitecustomize.py") and module not in used
        if not any(module in text for text in texts)
    ]


def _text(module: str, files: Mapping[str, Path]) -> str:
    """Return the source of a module and of the modules that it star-imports."""
    text = files[module].read_text() if module in files else ""
    return text + "".join(_text(f"{module}.{name}", files) for name in re.findall(r"from \.(\w+) import \*", text))


def long_files(root: Path, limit: int) -> list[str]:
    files = (file for source in SOURCES for file in [*(root / source).rglob("*.py"), root / source])
    counted = {str(file.relative_to(root)): len(file.read_text().splitlines()) for file in files if file.is_file()}
    return [f"{name}: {count} lines" for name, count in sorted(counted.items()) if count > limit]


def code_lines(text: str) -> int:
    """Count the lines with code: without blank lines, comments and docstrings."""
    strings = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - {line for string in strings for line in range(string.lineno, string.end_lineno + 1)})


def core_lines(root: Path) -> int:
    files = (f for name, f in module_files(root).items() if f"{name}.".split(".")[1] not in OUTSIDE_THE_CORE)
    return sum(code_lines(file.read_text()) for file in files)


def test_no_file_is_over_the_limit():
    assert not long_files(ROOT, FILE_LINES)


def test_the_core_is_not_over_the_limit():
    assert core_lines(ROOT) <= CORE_LINES


def test_scripts_import_names_that_exist():
    assert not unresolved_imports(ROOT)


def test_every_module_is_used():
    assert not unused_modules(ROOT)


# Each rule fails where it should: a copy of the package's ground floor with one fault added.


@pytest.fixture
def house(tmp_path):
    shutil.copytree(ROOT / PACKAGE / "objectives", tmp_path / PACKAGE / "objectives")
    for name in ("__init__.py", "aliases.py", "errors.py"):
        shutil.copy(ROOT / PACKAGE / name, tmp_path / PACKAGE / name)
    (tmp_path / PACKAGE / "train").mkdir()
    (tmp_path / PACKAGE / "train" / "__init__.py").touch()
    return tmp_path


def test_a_script_that_imports_a_missing_name_is_found(house):
    (house / "tools").mkdir()
    (house / "tools" / "script.py").write_text(
        "from dppo_megatron.objectives import build_objective, attic\n"
        "def main():\n    from dppo_megatron.gone import x\n"
    )
    assert unresolved_imports(house) == [
        "tools/script.py: dppo_megatron.objectives has no attic",
        "tools/script.py: dppo_megatron.gone has no x",
    ]


def test_a_module_that_nothing_names_is_found(house):
    (house / PACKAGE / "train" / "attic.py").write_text("x = 1\n")
    assert f"{PACKAGE}.train.attic" in unused_modules(house)


def test_a_long_file_is_found(house):
    (house / PACKAGE / "train" / "long.py").write_text("x = 1\n" * (FILE_LINES + 1))
    assert long_files(house, FILE_LINES) == [f"{PACKAGE}/train/long.py: {FILE_LINES + 1} lines"]


def test_code_lines_of_the_core_are_counted(house):
    before = core_lines(house)
    text = (
        '"""Docstring.\n\nMore.\n"""\n\n# comment\nx = (\n    1\n)\n\n\ndef f():\n    """Docstring."""\n    return 1\n'
    )
    for group in ("train", "lab"):
        (house / PACKAGE / group).mkdir(exist_ok=True)
        (house / PACKAGE / group / "part.py").write_text(text)
    assert core_lines(house) == before + 5
