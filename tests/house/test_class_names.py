"""Class names are unique in the package, so that a name in a traceback, a log or a search names one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "dppo_megatron"


def shared_names(root: Path) -> dict[str, list[str]]:
    """Return each class name with several definitions, and their files."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(root)))
    return {name: files for name, files in found.items() if len(files) > 1}


def test_a_class_name_names_one_class():
    assert shared_names(PACKAGE) == {}


def test_a_second_class_of_a_name_is_found(tmp_path):
    (tmp_path / "a.py").write_text("class One: ...\nclass Two: ...\n")
    (tmp_path / "b.py").write_text("def f():\n    class One: ...\n")
    assert shared_names(tmp_path) == {"One": ["a.py", "b.py"]}
