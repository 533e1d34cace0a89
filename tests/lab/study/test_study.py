"""The grid, the rows and the statistics of a study; real runs are in tests/e2e/test_study.py."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from dppo_megatron.config import ConfigError
from dppo_megatron.errors import ExpectedError
from dppo_megatron.lab.study.grid import read_study
from dppo_megatron.lab.study.rows import StudyRow, add_row, make_row, read_rows
from dppo_megatron.lab.study.runner import StudyError, missing, run_study
from dppo_megatron.lab.study.study_report import write_report
from dppo_megatron.lab.study.verdicts import difference, estimate
from dppo_megatron.report.history import ReportError
from dppo_megatron.run_dir import RunDir

BASE = Path(__file__).parents[3] / "examples" / "quickstart" / "config.yaml"


def write_study(tmp_path: Path, **changes) -> Path:
    tree = {
        "base": str(BASE),
        "methods": {"pg": {"objective.name": "pg_is", "objective.settings": {}}, "dppo": {}},
        "conditions": {"slow": {"optimizer.lr": 0.0001}, "fast": {"optimizer.lr": 0.001}},
        "seeds": [1, 2, 3],
    }
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(tree | changes, sort_keys=False))
    return path


@pytest.fixture
def study(tmp_path):
    return read_study(write_study(tmp_path), tmp_path / "out")


def row(study, number: int, final: float | None, **changes) -> StudyRow:
    cell = study.cells[number]
    made = make_row(cell, study.file, failed="no metrics", seconds=60.0)
    curve = () if final is None else ((0, 0.25), (10, final))
    made = replace(made, status="done", error="", steps=10, first=0.25, final=final, best=final, curve=curve)
    return replace(made, **{"collapsed": False, "masked_share": 0.01, "mismatch_kl": 1e-4, **changes})


def test_every_method_under_every_condition_with_every_seed(study, tmp_path):
    assert len(study.cells) == 12
    first, second = study.cells[:2]
    assert (first.name, second.name) == ("pg/slow/seed-1", "dppo/slow/seed-1")
    assert first.config.optimizer.lr == 1e-4
    assert first.config.objective.name == "pg_is"
    assert first.config.run.dir == tmp_path / "out" / "runs" / "pg" / "slow" / "seed-1"
    assert len({cell.hash for cell in study.cells}) == 12
    elsewhere = read_study(write_study(tmp_path), tmp_path / "other")
    assert [cell.hash for cell in elsewhere.cells] == [cell.hash for cell in study.cells]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"seeds: !!python/object/apply:os.system [x]", "line 1, column 8: seeds: a tag; write only the value"),
        (b"seeds: [", "not valid YAML: line 1"),
        (b"a: &a [*a]", "contains itself"),
        (b"[1]", "must be a mapping of sections, found list"),
        (b"\xff", "line 1: not UTF-8"),
        ({"seeds": []}, "seeds"),
        ({"seeds": 3}, r"seeds: must be a list; write \[3\] for one entry, e.g. \[1, 2, 3\] for several"),
        ({"methods": ["a"]}, r"methods: must be a mapping; write {NAME: {SETTING: VALUE}}"),
        ({"methods": {"a": {}, "b": {}}}, "methods.b = {}: the same settings as a in condition"),
        (b"base: x", "methods: required, not set"),
        (b"run: {dir: x}", "1 problem\n  - the config of a run; write a study with base: .*, methods and seeds"),
        ({"metods": {}}, "metods: unknown; did you mean 'methods'?"),
        ({"methods": {"a b": {}}}, "methods"),
        ({"methods": {"dppo": {"objective.nme": "dppo_binary_tv"}}}, "objective.name"),
        ({"conditions": {"x": {"optimizer.lr": -1}}}, "optimizer.lr"),
        ({"metric": "eval/acuracy"}, "metric = eval/acuracy: unknown; did you mean 'eval/accuracy'?"),
        (
            {"settings": {"data.eval": None, "eval.every": 0}},
            "metric = eval/accuracy: .* has no held-out prompts; set data.eval",
        ),
        ({"metric": "[a](http://b) | <c>"}, "metric"),
    ],
)
def test_a_mistake_in_the_study_file_is_an_error_before_anything_runs(content, said, tmp_path):
    path = write_study(tmp_path, **(content if isinstance(content, dict) else {}))
    if isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_study(path, tmp_path / "out")


def test_a_cell_with_a_row_is_not_run_again(study, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    add_row(out, row(study, 0, 0.9))
    add_row(out, row(study, 3, None, status="failed"))
    assert [study.cells.index(cell) for cell in missing(study, out)] == [1, 2, *range(4, 12)]
    with pytest.raises(StudyError, match="runs 0 to 11"):
        run_study(study, out, print, only=12)
    changed = read_study(write_study(tmp_path, settings={"train.updates_per_step": 4}), out)
    with pytest.raises(StudyError, match="has other settings"):
        missing(changed, out)


def test_a_run_that_failed_is_a_row(study):
    made = make_row(study.cells[0], study.file, failed="exit code 1", seconds=1.0)
    assert (made.status, made.collapsed, made.final, made.error) == ("failed", True, None, "exit code 1")


def test_a_metric_that_no_complete_run_records_is_refused_by_name(study):
    cell = study.cells[0]
    cell.config.run.dir.mkdir(parents=True)
    (cell.config.run.dir / "metrics.jsonl").write_text('{"step": 1, "eval/accuracy": 0.5, "train/loss": 1.0}\n')
    file = study.file.model_copy(update={"metric": "eval/acuracy"})
    with pytest.raises(
        ReportError, match=r"metric = eval/acuracy: pg/slow/seed-1 did not .*did you mean 'eval/accuracy'\?$"
    ):
        make_row(cell, file, failed=None, seconds=1.0)
    assert make_row(cell, file, failed="exit code 1", seconds=1.0).final is None


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_run_that_goes_on_is_neither_removed_nor_a_row(study, tmp_path, checkpoint, monkeypatch):
    run = RunDir(study.cells[0].config.run.dir)
    monkeypatch.setattr("dppo_megatron.lab.study.runner.Child", None)  # nothing is started
    with run.take():
        run.metrics.write_text("{}\n")
        if checkpoint:
            run.checkpoints.mkdir()
            (run.checkpoints / "latest").write_text("step-000004")
        with pytest.raises(ExpectedError, match=rf"{run.root}: this run is in use by process {os.getpid()}"):
            run_study(study, tmp_path / "out", print, only=0)
    assert run.metrics.exists()
    assert read_rows(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("values", "collapsed"),
    [
        ([0.25, 0.9, 0.85], False),
        ([0.25, 0.9, 0.4], True),
        ([0.25, 0.2], True),
        ([0.25, 0.25], False),
        ([-0.6, -0.2, -0.3], False),
        ([-0.6, -0.2, -0.7], True),
        ([-0.6, 0.8, 0.3], True),
    ],
)
def test_collapse_is_by_the_rule(values, collapsed, study):
    cell = study.cells[0]
    cell.config.run.dir.mkdir(parents=True)
    lines = [{"step": 10 * i, "time": float(i), "eval/accuracy": value} for i, value in enumerate(values)]
    (cell.config.run.dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = make_row(cell, study.file, failed=None, seconds=1.0)
    assert made.collapsed is collapsed
    assert (made.first, made.final, made.best) == (values[0], values[-1], max(values))


@pytest.mark.parametrize("seeds", [3, 5, 12])
def test_an_interval_leaves_out_the_mean_in_one_study_of_twenty(seeds):
    """A percentile bootstrap interval of three values leaves it out in one of four."""
    rng = np.random.default_rng(1)
    found = [estimate(rng.normal(size=seeds)) for _ in range(2000)]
    assert 0.035 < np.mean([each.excludes_zero for each in found]) < 0.065
    assert estimate([1.0, 2.0]) is None


def test_differences_are_paired_by_seed(study):
    """Seeds differ by 1, methods by .01 in every seed: only pairs show it."""
    gain = {"dppo": lambda seed: seed + 0.01, "pg": lambda seed: 1.0001 * seed}
    rows = [row(study, number, gain[cell.method](cell.seed)) for number, cell in enumerate(study.cells)]
    found = difference(rows, "dppo", "pg", "slow")
    assert found.excludes_zero
    assert found.mean == pytest.approx(0.0098)


def test_the_report_is_drawn_from_stored_rows(study, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for number, cell in enumerate(study.cells[:-1]):
        add_row(
            out, row(study, number, 0.9 if cell.method == "dppo" else 0.5 + 0.01 * cell.seed, collapsed=number == 0)
        )
    assert len(read_rows(out)) == 11
    text = write_report(study.file, out).read_text()
    assert "# 11 of 12 runs" in text
    assert "| pg | 1 of 3 | 0.520 [0.495, 0.545] | - | 0.520, 0.530 | - | 1.00% | 1.0e-04 |" in text
    reached, apart = "0.900 [0.900, 0.900]", "**+0.380 [+0.355, +0.405]**"
    assert f"| dppo | 0 of 3 | {reached} | {apart} | {reached} | - | 1.00% | 1.0e-04 |" in text
    assert "| dppo | 0 of 2 | 0.900, 0.900 | - | 0.900, 0.900 | - | 1.00% | 1.0e-04 |" in text
    assert '"pg","slow",1,' in (out / "table.csv").read_text()
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_many_methods_have_a_panel_each_and_no_row_is_no_report(study, tmp_path):
    file = study.file.model_copy(update={"methods": {**study.file.methods, **{f"m{i}": {} for i in range(7)}}})
    with pytest.raises(ReportError, match="no run of the study has ended there"):
        write_report(file, tmp_path)
    for number, cell in enumerate(study.cells):
        for method in (cell.method, f"m{number % 7}"):
            add_row(tmp_path, replace(row(study, number, 0.5), method=method))
    write_report(file, tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
