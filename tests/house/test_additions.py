"""Every preset and metric has what docs/adding.md requires: a written loss or a test, and a row in the docs."""

import re
from collections.abc import Iterable
from pathlib import Path

from dppo_megatron.objectives import PRESETS
from tests.house.test_names import PACKAGE, metric_names
from tests.objectives.published_axes import EVERY
from tests.objectives.worked_cases import METHODS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "objectives.md").read_text()
OF_ANY_GROUP = re.compile(r"(?:[a-z]\w+|\*)/[a-z][\w*]+")
SIGNS = ("", "_positive", "_negative")


def without_loss(presets: Iterable[str]) -> list[str]:
    """Return the presets without a written loss and a worked case of the preset's own values."""
    compared = {name for name, overrides, _ in [*EVERY.values(), *METHODS.values()] if not overrides}
    return [name for name in presets if name not in compared]


def without_row(presets: Iterable[str], page: str) -> list[str]:
    section = page.split("## Choosing a method\n")[1].split("\n## ")[0]
    return [name for name in presets if f"`{name}`" not in section]


def rows_of_metrics(page: str) -> set[str]:
    """Return the metrics in the first column of the tables below "Metrics".

    In a row `weight/mean`, `/min` the second is weight/min. `_max` after `policy/divergence_mean` replaces its last
    word, but `_positive` after `train/entropy` does not, so the result has both.
    """
    section, names = page.split("## Metrics\n")[1].split("\n## ")[0], set()
    for cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
        full = ""
        for span in re.findall(r"`([^`]+)`", cell):
            if span.startswith("_"):
                names |= {full + span, full.rpartition("_")[0] + span}
                continue
            full = full.split("/")[0] + span if span.startswith("/") else span
            names.add(full)
    return names


def metrics_without_row(metrics: Iterable[str], page: str) -> list[str]:
    """Return the metrics without a row. A metric recorded by sign needs only the rows of its signs."""
    rows = rows_of_metrics(page)
    return [name for name in metrics if not any(re.fullmatch(form(name) + sign, row) for row in rows for sign in SIGNS)]


def metrics_without_test(metrics: Iterable[str], tests: Path) -> list[str]:
    """Return the metrics that no file of tests names. tests/house names examples, so it does not count."""
    text = "\n".join(path.read_text() for path in sorted(tests.rglob("*.py")) if path.parent.name != "house")
    return [name for name in metrics if not re.search(form(name) + r"(?!\w)", text)]


def form(metric: str) -> str:
    """Return the pattern of a name in which `*` is the value of an f-string."""
    return re.escape(metric).replace(r"\*", r"\w+")


def test_a_preset_has_a_written_loss_and_a_row():
    assert without_loss(PRESETS) == []
    assert without_row(PRESETS, PAGE) == []


def test_a_preset_without_its_loss_or_its_row_is_named():
    assert without_loss(["dppo_binary_tv", "tight_negative"]) == ["tight_negative"]
    assert without_row(["dppo_binary_tv", "tight_negative"], PAGE) == ["tight_negative"]


def test_a_metric_of_an_objective_has_a_row_and_a_test():
    metrics = metric_names(PACKAGE / "objectives", OF_ANY_GROUP)
    assert {"policy/masked_share", "weight/mean", "*/k1"} <= metrics.keys()
    assert metrics_without_row(metrics, PAGE) == []
    assert metrics_without_test(metrics, ROOT / "tests" / "objectives") == []


def test_a_listed_metric_has_a_test():
    metrics = {name for name in metric_names(PACKAGE) if "*" not in name}
    assert metrics_without_test(metrics, ROOT / "tests") == []


def test_a_metric_without_its_row_or_its_test_is_named(tmp_path):
    (tmp_path / "metrics.py").write_text('metrics["policy/rarer_share"], x["weight/mean"], f"{name}/k1", f"{name}/k9"')
    metrics = sorted(metric_names(tmp_path, OF_ANY_GROUP))
    assert metrics_without_row(metrics, PAGE) == ["*/k9", "policy/rarer_share"]
    (tmp_path / "test_metrics.py").write_text('"policy/rarer_share_of_others", "weight/mean", "mismatch/k1"')
    (tmp_path / "metrics.py").unlink()
    assert metrics_without_test(metrics, tmp_path) == ["*/k9", "policy/rarer_share"]


def test_short_names_in_a_row_are_those_of_its_first():
    page = "## Metrics\n| `a/b_mean`, `_max`, `/c`, `d/e` | `x/y` |\n\n## Next\n| `f/g` | |"
    assert {"a/b_mean", "a/b_max", "a/c", "d/e"} == rows_of_metrics(page) - {"a/b_mean_max"}
