"""The rules of the house: which room may import which, no circle of modules, how long a file and a room may be.

CONTRIBUTING.md states the rules and these tests read them there, so the text is the rule. Every rule is also run
against a small tree of files that breaks it.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "dppo_megatron"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
RULES = " ".join(CONTRIBUTING.split())
FILE_LINES = int(re.search(r"No file has more than (\d+) lines", RULES)[1])
ROOM_SHARE = float(re.search(r"no folder more than (\d+) % of the package", RULES)[1]) / 100
SCRIPTS = ("benchmarks", "examples", "tools", "docs")
SOURCES = ("dppo_megatron", "tests", "tools", "examples", "benchmarks", "docs", "setup.py")


def import_order(text: str) -> dict[str, int]:
    """Room -> its line in the numbered block of CONTRIBUTING.md; `__main__` stands beside `cli`."""
    lines = re.findall(r"^ *(\d+)  (\w+(?:, \w+)*)(?: {2,}.*)?$", text, re.MULTILINE)
    order = {room: int(number) for number, rooms in lines for room in rooms.split(", ")}
    return order | {"__main__": order["cli"] + 1}


ORDER = import_order(CONTRIBUTING)


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


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def upward_imports(root: Path, order: Mapping[str, int]) -> list[str]:
    """Imports of a room that does not stand on a lower line, and rooms that stand nowhere."""
    found = {room(module) for module in module_files(root)} - {PACKAGE}
    lost = [f"{name} has no line in CONTRIBUTING.md" for name in sorted(found - set(order))]
    wrong = [
        f"{module} (line {order[room(module)]}) imports {name} (line {order[room(name)]})"
        for module, names in imports(root).items()
        for name in sorted(names)
        if PACKAGE not in (room(module), room(name)) and room(module) != room(name)
        if order.get(room(name), 0) >= order.get(room(module), 99)
    ]
    return lost + wrong


def circle(root: Path) -> list[str]:
    """The modules of one circle of imports, empty when there is none."""
    try:
        TopologicalSorter(imports(root)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


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


def lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def long_files(root: Path, limit: int) -> list[str]:
    files = (file for source in SOURCES for file in [*(root / source).rglob("*.py"), root / source])
    counted = {str(file.relative_to(root)): lines(file) for file in files if file.is_file()}
    return [f"{name}: {count} lines" for name, count in sorted(counted.items()) if count > limit]


def large_rooms(root: Path, share: float) -> list[str]:
    sizes: dict[str, int] = {}
    for module, file in module_files(root).items():
        sizes[room(module)] = sizes.get(room(module), 0) + lines(file)
    total = sum(sizes.values())
    return [f"{name}: {size / total:.1%}" for name, size in sizes.items() if size > share * total]


def test_a_room_imports_only_rooms_of_lower_lines():
    assert not upward_imports(ROOT, ORDER)


def test_no_circle_of_imports_not_even_one_for_type_checkers():
    assert not circle(ROOT)


def test_no_file_is_over_the_limit():
    assert not long_files(ROOT, FILE_LINES)


def test_no_room_is_over_the_limit():
    assert not large_rooms(ROOT, ROOM_SHARE)


def test_scripts_import_names_that_exist():
    assert not unresolved_imports(ROOT)


def test_every_module_is_used():
    assert not unused_modules(ROOT)


def test_every_room_of_the_order_exists():
    rooms = {room(module) for module in module_files(ROOT)}
    assert set(ORDER) <= rooms
    assert (ORDER["errors"], ORDER["cli"]) == (1, max(ORDER.values()) - 1)


# Each rule fails where it should: a copy of the package's ground floor with one fault added.


@pytest.fixture
def house(tmp_path):
    shutil.copytree(ROOT / PACKAGE / "objectives", tmp_path / PACKAGE / "objectives")
    for name in ("__init__.py", "errors.py"):
        shutil.copy(ROOT / PACKAGE / name, tmp_path / PACKAGE / name)
    (tmp_path / PACKAGE / "trainer").mkdir()
    (tmp_path / PACKAGE / "trainer" / "__init__.py").touch()
    assert not upward_imports(tmp_path, ORDER)
    assert not circle(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "from dppo_megatron import trainer",
        "from dppo_megatron.trainer import Loop",
        "import dppo_megatron.trainer",
        "from .. import trainer",
        "if TYPE_CHECKING:\n    from ..trainer import Loop",
        "def late():\n    from dppo_megatron.trainer import Loop",
    ],
)
def test_the_order_rule_sees_every_form_of_import(house, line):
    (house / PACKAGE / "objectives" / "fault.py").write_text(line)
    found = upward_imports(house, ORDER)
    assert found == ["dppo_megatron.objectives.fault (line 2) imports dppo_megatron.trainer (line 13)"]


def test_the_order_rule_refuses_a_neighbour_and_a_room_without_a_line(house):
    (house / PACKAGE / "common").mkdir()
    (house / PACKAGE / "common" / "__init__.py").write_text("from dppo_megatron.objectives import build_objective")
    (house / PACKAGE / "attic.py").touch()
    found = upward_imports(house, ORDER)
    assert found[0] == "attic has no line in CONTRIBUTING.md"
    assert found[1].startswith("dppo_megatron.common (line 2) imports dppo_megatron.objectives")


@pytest.mark.parametrize("back", ["from . import a", "if TYPE_CHECKING:\n    from .a import A"])
def test_the_circle_rule_sees_circles_inside_a_folder(house, back):
    (house / PACKAGE / "trainer" / "a.py").write_text("from .b import B")
    (house / PACKAGE / "trainer" / "b.py").write_text(back)
    assert {"dppo_megatron.trainer.a", "dppo_megatron.trainer.b"} <= set(circle(house))


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
    (house / PACKAGE / "trainer" / "attic.py").write_text("x = 1\n")
    assert f"{PACKAGE}.trainer.attic" in unused_modules(house)


def test_the_length_rules_count_lines(house):
    (house / PACKAGE / "trainer" / "long.py").write_text("x = 1\n" * (FILE_LINES + 1))
    assert long_files(house, FILE_LINES) == [f"{PACKAGE}/trainer/long.py: {FILE_LINES + 1} lines"]
    assert [found.split(":")[0] for found in large_rooms(house, 0.5)] == ["objectives"]
    assert not large_rooms(house, 0.999)
