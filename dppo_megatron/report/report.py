"""Writes a report on a run, or on several side by side: a console table, report.md and curves.png."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dppo_megatron.common.files import numbered_directory, output, write_atomic
from dppo_megatron.errors import bounded

from .curves import CALLS, draw_curves
from .heldout import heldout_scores, score_format
from .history import History, ReportError, Series, labels, load_history
from .logs import duration
from .masked_tokens import masked_rows
from .names import PUBLISH_PARTS, STEP_PARTS

Rows = dict[str, list[str]]  # quantity -> value in each run

NONE = "-"
_LONGEST_CELL = 400  # bytes
_SIZES = {"TP": "tensor", "PP": "pipeline", "VPP": "virtual_pipeline", "CP": "context", "EP": "expert"}
_PRINTED = 15  # table rows in a terminal
_MAIN = ("method", "steps", "held-out", "reward", "turns, ", "masked share", "mismatch KL", "grad norm",
         "learning rate", "response tokens", "tokens/s", "seconds per step", "time in steps", "loss")  # fmt: skip
_FAILURES = ("skipped updates", "failed rewards", "failed trajectories")
_NOTES = """\
Masked share counts tokens with advantage A other than 0. Mismatch compares the engine's log-probs of the sampled
tokens with the trainer's, for the same weights, in nats. Parts of a step are seconds of a mean step; `other` is
the remaining time. An accuracy of 0 next to a mean reward above 0 is left out: no answer reaches eval.pass_reward.
Most masked tokens are counted from the ten of each step, with their share of all masked tokens.
"""


def write_report(
    runs: Path | str | Sequence[Path | str], out: Path | str | None = None, *, console: Console | None = None
) -> Path:
    """Print the main rows, write report.md with all rows and curves.png, and return the report.md path.

    `out` defaults to RUN/report for a single run, and for several runs to a new directory `comparison-N` next to the
    first run. For three or more runs, the table has a row per run. Runs may be in progress. Raises ReportError for a
    run without metrics.
    """
    run_dirs = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    if not run_dirs:
        raise ReportError("no run directory given; name at least one")
    histories = [load_history(path, label) for path, label in zip(run_dirs, labels(run_dirs), strict=True)]
    if out is None and len(run_dirs) > 1:
        out = numbered_directory(run_dirs[0].parent, "comparison", option="--out")
    directory = output(Path(out or run_dirs[0] / "report"), directory=True)
    path, curves = output(directory / "report.md"), output(directory / "curves.png")
    draw_curves(histories, curves)

    names, num_steps = [bounded(history.label, _LONGEST_CELL) for history in histories], window(histories)
    rows = _side_by_side(histories, lambda run: summary_rows(run, num_steps))
    columns = _overview(histories, num_steps)
    by_run = dict(zip(names, map(list, zip(*columns.values(), strict=True)), strict=True))
    run_per_row = len(names) > 2
    console = console or Console()
    head, main = (["run", *columns], by_run) if run_per_row else (["run", *names], _main_rows(rows))
    console.print(_table(head, main, console.width))
    text = [f"# {' against '.join(map(as_text, names))}", *([_markdown(["", *columns], by_run)] if run_per_row else [])]
    text.append(_markdown(["", *names], rows))
    for title, corner, rows_of in _TABLES:
        if rows := _side_by_side(histories, rows_of):
            text += [f"## {title}", _markdown([corner, *names], rows)]
    write_atomic(path, "\n\n".join([*text, "## Curves", "![curves](curves.png)", _NOTES]))
    return path


def window(runs: Sequence[History]) -> int:
    """Return how many first and last steps the table averages. All runs in a comparison use this number."""
    return max(1, min(10, *(len(run.steps) // 4 for run in runs)))


def summary_rows(run: History, window_size: int | None = None) -> dict[str, str]:
    """Return quantity -> value in table order. `window_size` defaults to the `window` of this run."""
    window_size = window_size or window([run])
    return {**_method(run), **_result(run, window_size), **_health(run, window_size), **_cost(run)}


def objective_settings(run: History) -> Any | None:
    """Return the run's `ObjectiveSettings`, or None if this installation cannot resolve its objective."""
    from dppo_megatron.objectives import ObjectiveSettings

    settings = getattr(_objective(run), "settings", None)
    return settings if isinstance(settings, ObjectiveSettings) else None


def time_rows(run: History) -> dict[str, str]:
    """Return step part -> mean seconds per step, and share of the total step time."""
    steps = run.series("time/step_s")
    if not steps:
        return {}

    def inside(name: str) -> float:  # the first publish, for example, precedes the first step
        return sum(value for step, value in zip(*run.series(name), strict=True) if step in counted)

    def shown(seconds: float) -> str:
        return f"{seconds / len(counted):.2f} s ({seconds / steps.total:.0%})" if steps.total > 0 else NONE

    counted = set(steps.steps)
    rows = {}
    for name in filter(run.series, STEP_PARTS):
        rows[_part_label(name)] = shown(inside(name))
        if name == "time/publish_s":
            rows |= {f"  {_part_label(inner)}": shown(inside(inner)) for inner in PUBLISH_PARTS}
    rows["other"] = shown(max(0.0, steps.total - sum(map(inside, STEP_PARTS))))
    rows["step"] = shown(steps.total)
    return rows


def _method(run: History) -> dict[str, str]:
    method = run.setting("objective.name", str)
    size = {name: max(1, run.setting(f"parallel.{name}", int) or 1) for name in _SIZES.values()}
    split = [f"{short} {size[name]}" for short, name in _SIZES.items() if size[name] > 1]
    ranks = run.setting("parallel.world_size", int)
    model_ranks = size["tensor"] * size["pipeline"] * size["context"]
    if ranks and ranks > model_ranks:
        split.append(f"DP {ranks // model_ranks}")
    layout = f"{ranks} rank{'s' if ranks != 1 else ''}" + (f": {', '.join(split)}" if split else "")
    sampled = [run.setting(f"rollout.{name}", int) for name in ("prompts_per_step", "group_size")]
    if method == "nll":
        sampled = sampled[:1]  # examples
    return {
        "method": _text(method),
        "method in short": _in_words(run),
        "learning rate": _number(run.setting("optimizer.lr", int, float), "g"),
        "prompts x samples": " x ".join(map(_text, sampled)) if all(sampled) else NONE,
        "layout": layout if ranks else NONE,
    }


def _objective(run: History) -> Any | None:
    try:
        from dppo_megatron.objectives import build_objective

        return build_objective(run.setting("objective.name", str), **(run.setting("objective.settings", dict) or {}))
    except Exception:  # custom objectives, older settings: the report must not depend on them
        return None


def _in_words(run: History) -> str:
    """Describe the method briefly, or list the settings if this installation does not have the objective."""
    try:
        words = _objective(run).describe().partition("\n")[0]  # type: ignore[union-attr]
        return words.removeprefix(f"objective {run.setting('objective.name', str)}: ")
    except Exception:  # as in `_objective`
        settings = run.setting("objective.settings", dict) or {}
        return ", ".join(f"{key} {value}" for key, value in settings.items()) or NONE


def _result(run: History, num_steps: int) -> dict[str, str]:
    reward, loss = run.series("rollout/reward_mean"), run.series("train/loss")
    total_steps = run.setting("train.steps", int)
    last = max(run.steps, default=0)
    return {
        "steps": f"{last} of {total_steps}" if total_steps and total_steps != last else str(last),
        **{
            f"held-out {label} first, last, best": _first_last_best(run.series(name), score_format(name))
            for name, label in heldout_scores(run.rows.values()).items()
        },
        "reward first": _number(reward.at_start(num_steps), ".3f", f" (mean of {num_steps})"),
        "reward last": _number(reward.at_end(num_steps), ".3f", f" (mean of {num_steps})"),
        "loss first, last": f"{_number(loss.at_start(num_steps), '.2g')}, {_number(loss.at_end(num_steps), '.2g')}",
    }


def _first_last_best(series: Series, form: str) -> str:
    values = list(zip(series.values, series.steps, strict=True))
    return ", ".join(f"{value:{form}} (step {step})" for value, step in (values[0], values[-1], max(values)))


def _health(run: History, num_steps: int) -> dict[str, str]:
    def mean(name: str, form: str, unit: str = "") -> str:
        return _number(run.series(name).mean, form, unit)

    def mean_and_max(name: str) -> str:
        return f"{mean(name, '.2g')}, {_number(run.series(name).max, '.2g')}"

    per_trajectory = [run.series(name) for name in CALLS]
    failures = [name for name in run.names if name.partition("/failed_")[0] == "environment"]
    failed_trajectories = sum(run.series(name).total for name in failures)
    signed = [mean(f"policy/masked_share_{sign}", ".2%") for sign in ("positive", "negative")]
    skipped, overflowed = (run.series(f"train/{kind}_updates").total for kind in ("skipped", "overflowed"))
    return {
        "masked share": mean("policy/masked_share", ".2%"),
        "  of A > 0, A < 0": ", ".join(signed),
        "mismatch KL mean, max": mean_and_max("mismatch/kl"),
        "largest log-prob difference": _number(run.series("mismatch/max_abs_logprob_difference").max, ".1e"),
        "largest weight check difference": _number(run.series("probe/max_abs_logprob_difference").max, ".1e"),
        "grad norm mean, max": mean_and_max("train/grad_norm"),
        "groups without signal": mean("rollout/groups_without_signal", ".1f", " a step"),
        "staleness": mean("rollout/staleness_mean", ".2f", " versions"),
        "skipped updates": f"{skipped:.0f}" + (f", {overflowed:.0f} of them fp16 overflows" if overflowed else ""),
        "failed rewards": f"{run.series('rollout/reward_failed').total:.0f}",
        f"{', '.join(CALLS.values())} first": ", ".join(
            _number(series.at_start(num_steps), ".2f") for series in per_trajectory
        ),
        f"{', '.join(CALLS.values())} last": ", ".join(
            _number(series.at_end(num_steps), ".2f") for series in per_trajectory
        ),
        "failed trajectories": f"{failed_trajectories:.0f}" if per_trajectory[0] else NONE,
    }


def _cost(run: History) -> dict[str, str]:
    seconds = run.series("time/step_s")
    by_step = dict(zip(*seconds, strict=True))
    rates = zip(*run.series("throughput/tokens_per_s"), strict=True)
    timed = [(value, by_step[step]) for step, value in rates if step in by_step]
    timed_s = sum(s for _, s in timed)
    tokens_per_s = sum(value * s for value, s in timed) / timed_s if timed_s else None
    wall = max(run.times) - min(run.times) + (seconds.values[0] if seconds else 0.0) if run.times else 0.0
    return {
        "tokens/s": _number(tokens_per_s, ",.0f"),
        "TFLOP/s per GPU": _number(run.series("throughput/tflops_per_gpu").mean, ",.3g"),
        "MFU": _number(run.series("throughput/mfu").mean, ".1%"),
        "response tokens": _number(run.series("rollout/response_tokens_mean").mean, ".1f", " mean"),
        "seconds per step": _number(seconds.mean, ".2f"),
        "time in steps": duration(seconds.total) if seconds else NONE,
        "time in evaluations": duration(run.series("time/eval_s").total),
        "first to last record": duration(wall),
    }


def _part_label(name: str) -> str:
    return name.removeprefix("time/").removesuffix("_s").removeprefix("publish_").replace("_", ", ")


def _number(value: float | None, form: str, unit: str = "") -> str:
    return NONE if value is None else format(value, form) + unit


def _text(value: Any) -> str:
    return NONE if value is None else str(value)


_TABLES: tuple[tuple[str, str, Callable[[History], Mapping[str, str]]], ...] = (  # title, corner, rows
    ("Where a step's time goes", "part", time_rows),
    ("Most masked tokens", "", lambda run: masked_rows(run.masked)),
)


def _side_by_side(histories: Sequence[History], rows_of: Callable[[History], Mapping[str, str]]) -> Rows:
    """Join the rows of all runs, and drop quantities that no run has."""
    columns = [dict([bounded(text, _LONGEST_CELL) for text in row] for row in rows_of(h).items()) for h in histories]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = {key: [column.get(key, NONE) for column in columns] for key in keys}
    return {key: values for key, values in rows.items() if any(value.strip(f"{NONE}, ") for value in values)}


def _main_rows(rows: Rows) -> Rows:
    """Return at most `_PRINTED` rows for a terminal: failures, and rows that begin with a name in `_MAIN`."""
    failed = [name for name in _FAILURES if set(rows.get(name, ())) - {"0", NONE}]
    names = [name for main in (*failed, *_MAIN) for name in rows if name.startswith(main)][:_PRINTED]
    return {name: values for name, values in rows.items() if name in names}


def _overview(runs: Sequence[History], num_steps: int) -> Rows:
    """Return the main comparison columns, without columns that no run has; a title may have two lines."""
    scores = heldout_scores(row for run in runs for row in run.rows.values())
    rewarded = any(run.series("rollout/reward_mean") for run in runs)
    metric, word, form = ("rollout/reward_mean", "reward", ".3f") if rewarded else ("train/loss", "loss", ".2g")
    columns: dict[str, Callable[[History], str]] = {
        "method": lambda run: _text(run.setting("objective.name", str)).replace("_", " "),  # lines break at spaces
        "steps": lambda run: str(max(run.steps, default=0)),
        f"{word}\nfirst {num_steps}": lambda run: _number(run.series(metric).at_start(num_steps), form),
        f"{word}\nlast {num_steps}": lambda run: _number(run.series(metric).at_end(num_steps), form),
        **{f"held-out\n{label}": partial(_last, name=name) for name, label in scores.items()},
        "masked\nshare": lambda run: _number(run.series("policy/masked_share").mean, ".2%"),
        "s/step": lambda run: _number(run.series("time/step_s").mean, ".3g"),
    }
    shown = {title: [column(run) for run in runs] for title, column in columns.items()}
    return {title: values for title, values in shown.items() if set(values) != {NONE}}


def _last(run: History, name: str) -> str:
    return _number(run.series(name).at_end(1), score_format(name))


def _table(head: Sequence[str], rows: Rows, width: int) -> Table:
    """Return a table that breaks lines only between words. A narrow terminal gets fewer columns, and short names."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    columns = [head[1:], *rows.values()]
    longest = [max(len(word) for cells in columns for word in cells[i].split()) for i in range(len(head) - 1)]
    left = width - sum(longest) - 2 * len(head)
    while left < min(20, max(map(len, rows))) and len(longest) > 5:
        left += longest.pop() + 2
    table.add_column(escape(head[0]), style="dim", no_wrap=True, max_width=max(left, 10))
    for title, size in zip(head[1:], longest, strict=False):
        table.add_column(escape(title), overflow="fold", min_width=size)
    for key, values in rows.items():
        table.add_row(*map(escape, (key, *values[: len(longest)])))  # a token may look like markup
    return table


def _markdown(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *([key, *values] for key, values in rows.items())]
    return "\n".join("| " + " | ".join(map(as_text, line)) + " |" for line in lines)


def as_text(text: str) -> str:
    """Return `text` as a line of Markdown without HTML, links, images, emphasis, code or table cells."""
    words = " ".join(html.escape(text, quote=False).split())
    escaped = re.sub(r"[\\`*~$|\[\]]|(?<![^\W_])_|_(?![^\W_])|(?<=www)\.|:(?=//)", r"\\\g<0>", words)
    return f"&nbsp;&nbsp;{escaped}" if text.startswith(" ") else escaped  # leading blanks mean "of which"
