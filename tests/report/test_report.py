import io
import json
import re

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from dppo_megatron.common.files import OutputError
from dppo_megatron.report.curves import CALLS
from dppo_megatron.report.history import ReportError, labels, load_history
from dppo_megatron.report.report import summary_rows, time_rows, write_report


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=120)


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_the_summary_reports_the_method_the_layout_and_the_results(make_run):
    rows = summary_rows(load_history(make_run("run", delta=0.2), "run"))
    expected = {
        "method": "dppo_binary_tv",
        "layout": "2 ranks: TP 2",
        "steps": "20",
        "held-out accuracy first, last, best": "25.0% (step 0), 75.0% (step 20), 75.0% (step 20)",
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
    for step, value in ((0, 0.1), (10, 0.3), (20, 0.2)):
        append(run, {"step": step, "eval/aime/avg@8": value, "eval/aime/avg@8_stderr": 0.05, "eval/aime/pass@8": 0.5})
    rows = summary_rows(load_history(run, "run"))
    assert rows["held-out accuracy first, last, best"].endswith("75.0% (step 20)")
    assert rows["held-out aime avg@8 first, last, best"] == "10.0% (step 0), 20.0% (step 20), 30.0% (step 10)"
    write_report(run, console=console)
    assert is_png(run / "report" / "curves.png")


def append(run, *records):
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": 1002.0, **record}) + "\n" for record in records)
    return run


@pytest.fixture
def panels(monkeypatch):
    """Returns title -> y values of each line of the last figure."""
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (drawn.append(figure), save(figure, *a, **k)))
    return lambda: {axes.get_title(): [list(line.get_ydata()) for line in axes.lines] for axes in drawn[-1].axes}


def graded(run):
    values = {0: (0.0, 0.015), 20: (0.0, 0.415)}
    return append(run, *({"step": s, "eval/accuracy": a, "eval/reward_mean": r} for s, (a, r) in values.items()))


def test_a_graded_reward_takes_the_place_of_an_accuracy_of_zero(make_run, console, panels):
    run = graded(make_run("run"))
    rows = summary_rows(load_history(run, "run"))
    assert rows["held-out reward first, last, best"] == "0.015 (step 0), 0.415 (step 20), 0.415 (step 20)"
    assert not any("accuracy" in name for name in rows)
    write_report(run, console=console)
    assert panels()["held-out mean reward"] == [[0.015, 0.415]]
    assert "held-out accuracy" not in panels()
    assert "turns and tool calls of a trajectory" not in panels()
    half_right = {"step": 20, "eval/accuracy": 0.5, "eval/reward_mean": 0.4}
    rows = summary_rows(load_history(append(run, half_right), "run"))
    assert [name for name in rows if name.startswith("held-out")] == [
        "held-out accuracy first, last, best",
        "held-out reward first, last, best",
    ]


def test_turns_calls_and_errors_of_agents_are_rows_and_curves(make_run, console, panels):
    run = make_run("run")
    counts = ({"step": s, **dict(zip(CALLS, (4 - s / 10, 3 - s / 10, 1), strict=True))} for s in range(1, 21))
    append(run, *counts, {"step": 3, "environment/failed_raised": 2.0, "environment/failed_timeout": 1.0})
    rows = summary_rows(load_history(run, "run"))
    assert rows["turns, tool calls, failed calls first"] == "3.70, 2.70, 1.00"
    assert rows["turns, tool calls, failed calls last"] == "2.20, 1.20, 1.00"
    assert rows["failed trajectories"] == "3"
    write_report(run, console=console)
    assert [line[-1] for line in panels()["turns and tool calls of a trajectory"]] == [2.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("minirl", {}, "masks tokens whose ratio to the old policy's probability leaves ["),
        ("dppo_binary_tv", {"delta": 0.2}, "masks tokens whose probability moves by more than 0.2 from the engine's"),
        ("my.module:method", {"delta": 0.3, "anchor": "old"}, "anchor old, delta 0.3"),  # by its settings
    ],
)
def test_method_is_described_as_the_objective_resolves_it(make_run, method, settings, words):
    rows = summary_rows(load_history(make_run("run", method, **settings), "run"))
    assert (rows["method"], rows["method in short"].startswith(words)) == (method, True)


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
    assert "| held-out accuracy first, last, best | 25.0% (step 0), 75.0% (step 20), 75.0% (step 20) |" in text
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
    assert console.file.getvalue().count("0.360 (mean of 5)") == 2
    first = write_report(runs, console=console)
    assert first.parent == tmp_path / "comparison-1"
    text = first.read_bytes()
    assert write_report(runs[::-1], console=console).parent == tmp_path / "comparison-2"
    assert first.read_bytes() == text


@pytest.mark.parametrize("width", [80, 100])
def test_nine_runs_are_a_row_each_with_distinct_colours_and_one_window(make_run, monkeypatch, width):
    colours = set()
    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda a, *v, **k: (colours.add(str(k.get("color"))), plot(a, *v, **k))[1])
    methods = ["dppo_binary_tv", "grpo_clip_higher", "experimental_topk_quadratic"]
    runs = [make_run(f"run-{i}", methods[i % 3], steps=12 + 4 * i) for i in range(9)]
    console = Console(file=io.StringIO(), width=width)
    text = write_report(runs, console=console).read_text()
    assert len(colours) == 9
    shown = console.file.getvalue()
    assert " first 3  last 3 " in shown  # a quarter of the shortest run
    for i in range(9):
        (row,) = [line for line in shown.splitlines() if line.startswith(f" run-{i} ")]
        assert " 0.340 " in row  # equal rewards in equal steps
    words = set(re.findall(r"[a-z]+", shown))
    assert {"binary", "experimental", "quadratic", "accuracy", "masked"} <= words
    assert max(map(len, shown.splitlines())) <= width
    assert "| run-3 | dppo binary tv | 24 | 0.340 |" in text
    assert text.count("0.340 (mean of 3)") == 9


@pytest.mark.parametrize("names", [("run",), ("run", "other")])
def test_a_terminal_shows_at_most_15_rows_and_the_report_all(make_run, names):
    runs = [append(make_run(name), {"step": 9, "rollout/reward_failed": 3.0}) for name in names]
    console = Console(file=io.StringIO(), width=80)
    text = write_report(runs, console=console).read_text()
    shown = console.file.getvalue()
    assert len(re.findall(r"^ \S.*", shown, re.MULTILINE)) - 2 <= 15
    assert "failed rewards" in shown
    assert "largest log-prob difference" not in shown
    assert "| largest log-prob difference |" in text
    assert "| publish |" in text


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


def test_names_and_settings_are_escaped_and_an_unwritable_report_is_an_error(make_run, console, tmp_path):
    run = make_run("[bold] a$b$")
    (run / "config.yaml").write_text("parallel: [1]\nobjective: {name: 7, settings: x}\noptimizer: {lr: fast}\n")
    report = write_report(run, console=console).read_text()
    assert report.startswith(r"# \[bold\] a\$b\$")
    assert "[bold] a$b$" in console.file.getvalue()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"--out = .*file: cannot be written: File exists; give another"):
        write_report(run, tmp_path / "file", console=console)
