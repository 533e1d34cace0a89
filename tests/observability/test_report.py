import io
import json

import pytest
from rich.console import Console

from dppo_megatron.common.files import OutputError
from dppo_megatron.observability.history import ReportError, labels, load_history
from dppo_megatron.observability.report import summary_rows, time_rows, write_report


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=120)


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_summary_says_what_was_trained_and_what_it_reached(make_run):
    rows = summary_rows(load_history(make_run("run", delta=0.2), "run"))
    expected = {
        "method": "dppo_binary_tv",
        "layout": "2 ranks: TP 2",
        "steps": "20",
        "accuracy before": "25.0% (step 0)",
        "accuracy after": "75.0% (step 20)",
        "reward first": "0.360 (mean of 5)",
        "reward last": "0.660 (mean of 5)",
        "masked share": "0.40%",
        "  of A > 0, A < 0": "0.20%, 0.60%",
        "tokens/s": "1,500",
        "time in steps": "0:00:40",
        "skipped updates": "0",
    }
    assert {key: rows[key] for key in expected} == expected


def test_named_sets_have_a_row_and_a_curve_each(make_run, console):
    run = make_run("run")
    with (run / "metrics.jsonl").open("a") as file:
        for step, value in ((0, 0.1), (10, 0.3), (20, 0.2)):
            record = {"eval/aime/avg@8": value, "eval/aime/avg@8_stderr": 0.05, "eval/aime/pass@8": 0.5}
            file.write(json.dumps({"step": step, "time": 1002.0, **record}) + "\n")
    rows = summary_rows(load_history(run, "run"))
    assert rows["accuracy after"] == "75.0% (step 20)"
    assert rows["aime avg@8 first, last, best"] == "10.0% (step 0), 20.0% (step 20), 30.0% (step 10)"
    write_report(run, console=console)
    assert is_png(run / "report" / "curves.png")


@pytest.mark.parametrize(
    ("method", "settings", "anchor", "region"),
    [
        ("minirl", {}, "old", "ratio in ["),
        ("dppo_binary_tv", {"delta": 0.2}, "rollout", "binary tv, delta 0.2"),
        ("my.module:method", {"delta": 0.3, "anchor": "rollout"}, "rollout", "delta 0.3"),  # by its settings
    ],
)
def test_method_is_described_as_the_objective_resolves_it(make_run, method, settings, anchor, region):
    rows = summary_rows(load_history(make_run("run", method, **settings), "run"))
    assert (rows["method"], rows["anchor"]) == (method, anchor)
    assert rows["trust region"].startswith(region)


def test_parts_of_the_step_add_up(make_run):
    rows = time_rows(load_history(make_run("run"), "run"))
    parts = {
        "wait": "1.00 s (50%)",
        "forward, backward": "0.50 s (25%)",
        "other": "0.20 s (10%)",
        "step": "2.00 s (100%)",
    }
    assert {key: rows[key] for key in parts} == parts


def test_a_later_record_of_a_step_completes_it_and_null_is_no_value(tmp_path):
    lines = [{"step": 1, "train/loss": None, "time/step_s": 1.0}, {"step": 1, "eval/accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = load_history(tmp_path, "run")
    assert history.steps == [1]
    assert history.series("eval/accuracy").values == (0.5,)
    assert not history.series("train/loss")


def test_report_of_one_run(make_run, console):
    run = make_run("run")
    path = write_report(run, console=console)
    assert path == run / "report" / "report.md"
    text = path.read_text()
    assert "| accuracy after | 75.0% (step 20) |" in text
    assert "| &nbsp;&nbsp;of A &gt; 0, A &lt; 0 | 0.20%, 0.60% |" in text
    assert "![curves](curves.png)" in text
    assert is_png(path.with_name("curves.png"))
    assert "75.0% (step 20)" in console.file.getvalue()
    assert "staleness" not in text  # recorded by no run


def test_report_of_several_runs_sets_them_side_by_side(make_run, tmp_path, console):
    runs = [make_run("tv"), make_run("grpo", "grpo_clip_higher", steps=60)]
    path = write_report([str(run) for run in runs], tmp_path / "out", console=console)
    assert path.parent == tmp_path / "out"
    assert "| method | dppo_binary_tv | grpo_clip_higher |" in path.read_text()
    assert is_png(path.with_name("curves.png"))
    assert write_report(runs, console=console).parent == tmp_path / "report"


@pytest.mark.parametrize(
    "records",
    [
        [{"step": 0, "time": 1.0, "eval/accuracy": 0.5}],
        [{"step": 1, "time": 1.0, "train/loss": 2.0, "time/step_s": 0.0}],
        [{"step": 1, "time": 1.0, "mismatch/kl": -1e-9, "train/grad_norm": None, "time/step_s": 1.0}],
    ],
    ids=["evaluation only", "one supervised step", "nothing a logarithm shows"],
)
def test_report_of_hardly_anything(tmp_path, console, records):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert is_png(write_report(tmp_path, console=console).with_name("curves.png"))


def test_a_directory_without_metrics_is_a_clear_error(tmp_path):
    with pytest.raises(ReportError, match=r"metrics.jsonl has no metrics"):
        write_report(tmp_path)


def test_labels_are_as_short_as_tells_them_apart(tmp_path):
    assert labels([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert labels([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert labels([tmp_path / "a", tmp_path / "a"]) == ["a (1)", "a (2)"]


def test_names_and_settings_are_text_and_a_report_that_cannot_be_written_says_so(make_run, console, tmp_path):
    run = make_run("[bold] a$b$")
    (run / "config.yaml").write_text("parallel: [1]\nobjective: {name: 7, settings: x}\noptimizer: {lr: fast}\n")
    report = write_report(run, console=console).read_text()
    assert report.startswith(r"# \[bold\] a\$b\$")
    assert "[bold] a$b$" in console.file.getvalue()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"--out = .*file: cannot be written: File exists; give another"):
        write_report(run, tmp_path / "file", console=console)
