"""A name in a traceback, a log or a search leads to one place: class names are unique, metrics have one name."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from dppo_megatron.report.names import METRICS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dppo_megatron"
LISTED = {metric.name for metric in METRICS}


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


OF_LISTED_GROUPS = re.compile(rf"(?:{'|'.join(sorted({name.split('/')[0] for name in LISTED}))}|\*)/[\w@/*]+")


def metric_names(root: Path, metric: re.Pattern[str] = OF_LISTED_GROUPS) -> dict[str, str]:
    """Return every string of the code that looks like a metric, with its file. In f-strings `*` is a value."""
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                text = node.value
            if metric.fullmatch(text) and path.name != "names.py":
                found[text] = str(path.relative_to(root))
    return found


def renamed(root: Path, listed: set[str], documented: str) -> tuple[set[str], set[str]]:
    """Return the listed metrics that no code names, and the metrics in code that neither list nor page names."""
    used = metric_names(root)
    forms = [re.compile(re.escape(name).replace(r"\*", r"\w*")) for name in used if not name.startswith("*")]
    plain = {name: re.sub("_(positive|negative)$", "", name) for name in listed}  # `by_sign` adds the ending
    unused = {name for name in listed if not any(form.fullmatch(plain[name]) for form in forms)}
    unknown = {name for name in used if "*" not in name and name not in {*listed, *plain.values()}}
    return unused, {name for name in unknown if f"/{name.split('/', 1)[1]}`" not in documented}


def test_a_metric_has_the_same_name_in_code_and_log():
    assert renamed(PACKAGE, LISTED, (ROOT / "docs/objectives.md").read_text()) == (set(), set())


def test_a_renamed_metric_is_found(tmp_path):
    (tmp_path / "a.py").write_text(
        'x["train/loss"], x["train/entropy"], x[f"time/{part}_s"], x["train/los"], x["policy/own"]'
    )
    listed = {"train/loss", "train/entropy_positive", "time/read_s", "train/lr"}
    assert renamed(tmp_path, listed, "`policy/own`") == ({"train/lr"}, {"train/los"})
