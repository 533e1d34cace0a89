"""Writes the report of a run, or of several side by side: a table on the console, report.md and curves.png."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dppo_megatron.common.files import output, write_atomic
from dppo_megatron.errors import bounded

from .curves import draw_curves
from .history import History, ReportError, Series, labels, load_history
from .logs import duration
from .masked_tokens import masked_rows
from .names import PUBLISH_PARTS, STEP_PARTS, accuracies

Rows = dict[str, list[str]]  # quantity -> its value in each run

NONE = "-"
_LONGEST_CELL = 400  # bytes
_SIZES = {"TP": "tensor", "PP": "pipeline", "VPP": "virtual_pipeline", "CP": "context", "EP": "expert"}
_NOTES = """\
Masked share counts tokens with advantage A other than 0. Mismatch compares the engine's log-probs of the sampled
tokens with the trainer's, for the same weights, in nats. Parts of a step are seconds of a mean step; `other` is
the remaining time. Most masked tokens are counted from the ten of each step, with their share of all masked tokens.
"""


def write_report(
    runs: Path | str | Sequence[Path | str], out: Path | str | None = None, *, console: Console | None = None
) -> Path:
    """Print the table, write report.md and curves.png, and return the path of report.md.

    `out` defaults to RUN/report for one run. For several runs, which are shown side by side, it is `report` next to the
    first run. The run may still be in progress. Raises ReportError for a run directory without metrics.
    """
    run_dirs = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    if not run_dirs:
        raise ReportError("no run directory given; name at least one")
    histories = [load_history(path, label) for path, label in zip(run_dirs, labels(run_dirs), strict=True)]
    default = run_dirs[0] / "report" if len(run_dirs) == 1 else run_dirs[0].parent / "report"
    directory = output(default if out is None else Path(out), directory=True)
    path, curves = output(directory / "report.md"), output(directory / "curves.png")
    draw_curves(histories, curves)

    names = [bounded(history.label, _LONGEST_CELL) for history in histories]
    console = console or Console()
    text = [f"# {' against '.join(map(as_text, names))}"]
    for title, corner, rows_of in _TABLES:
        if not (rows := _side_by_side(histories, rows_of)):
            continue
        console.print(_table(title.lower() or "run", names, rows))
        text += [f"## {title}"] if title else []
        text.append(_markdown(corner, names, rows))
    write_atomic(path, "\n\n".join([*text, "## Curves", "![curves](curves.png)", _NOTES]))
    return path


def summary_rows(run: History) -> dict[str, str]:
    """Return quantity -> value in the order of the table, with the same keys for every run."""
    return {**_method(run), **_result(run), **_health(run), **_cost(run)}


def time_rows(run: History) -> dict[str, str]:
    """Return part of the step -> seconds of a mean step and share of all steps."""
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
    anchor, region = _anchor_and_region(run)
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
        "anchor": anchor,
        "trust region": region,
        "learning rate": _number(run.setting("optimizer.lr", int, float), "g"),
        "prompts x samples": " x ".join(map(_text, sampled)) if all(sampled) else NONE,
        "layout": layout if ranks else NONE,
    }


def _anchor_and_region(run: History) -> tuple[str, str]:
    """Describe the resolved objective, or its settings if this installation does not have the objective."""
    name, given = run.setting("objective.name", str), run.setting("objective.settings", dict) or {}
    try:
        from dppo_megatron.objectives import build_objective

        s = build_objective(name, **given).settings
        if s.supervised or not s.has_region:
            return NONE, "none"
        if s.divergence == "ratio" and s.epsilon_low is not None and s.epsilon_high is not None:
            threshold = f"ratio in [{1 - s.epsilon_low:g}, {1 + s.epsilon_high:g}]"
        else:
            threshold = f"{s.divergence.replace('_', ' ')}, delta {s.delta:g}"
        cap = "" if s.ratio_cap is None else f", ratio cap {s.ratio_cap:g}"
        return s.anchor, f"{threshold}, {s.control.replace('_', ' ')}{cap}"
    except Exception:  # custom objectives, older settings: the report must not depend on them
        shown = ", ".join(f"{key} {value}" for key, value in given.items() if key != "anchor")
        return _text(given.get("anchor")), shown or NONE


def _result(run: History) -> dict[str, str]:
    reward, loss = run.series("rollout/reward_mean"), run.series("train/loss")
    few = max(1, min(10, len(run.steps) // 4))
    planned = run.setting("train.steps", int)
    last = max(run.steps, default=0)
    first, final, best = _first_last_best(run.series("eval/accuracy"))
    return {
        "steps": f"{last} of {planned}" if planned and planned != last else str(last),
        "accuracy before": first,
        "accuracy after": final if len(run.series("eval/accuracy").values) > 1 else NONE,
        "accuracy best": best,
        "reward first": _number(reward.at_start(few), ".3f", f" (mean of {few})"),
        "reward last": _number(reward.at_end(few), ".3f", f" (mean of {few})"),
        **{
            f"{label} first, last, best": ", ".join(_first_last_best(run.series(name)))
            for name, label in accuracies(run.names).items()
            if name != "eval/accuracy" and run.series(name)
        },
        "loss first, last": f"{_number(loss.at_start(few), '.2g')}, {_number(loss.at_end(few), '.2g')}",
    }


def _first_last_best(series: Series) -> list[str]:
    values = list(zip(series.values, series.steps, strict=True))
    chosen = [values[0], values[-1], max(values)] if values else []
    return [f"{value:.1%} (step {step})" for value, step in chosen] or [NONE] * 3


def _health(run: History) -> dict[str, str]:
    def mean(name: str, form: str, unit: str = "") -> str:
        return _number(run.series(name).mean, form, unit)

    def mean_and_max(name: str) -> str:
        return f"{mean(name, '.2g')}, {_number(run.series(name).max, '.2g')}"

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
    ("", "", summary_rows),
    ("Where a step's time goes", "part", time_rows),
    ("Most masked tokens", "", lambda run: masked_rows(run.masked)),
)


def _side_by_side(histories: Sequence[History], rows_of: Callable[[History], Mapping[str, str]]) -> Rows:
    """Join the rows of all runs, without quantities that no run has."""
    columns = [dict([bounded(text, _LONGEST_CELL) for text in row] for row in rows_of(h).items()) for h in histories]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = {key: [column.get(key, NONE) for column in columns] for key in keys}
    return {key: values for key, values in rows.items() if any(value.strip(f"{NONE}, ") for value in values)}


def _table(title: str, names: Sequence[str], rows: Rows) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title, style="dim", no_wrap=True)
    for name in names:
        table.add_column(escape(name), overflow="fold")
    for key, values in rows.items():
        table.add_row(*map(escape, (key, *values)))  # a token may look like markup
    return table


def _markdown(corner: str, names: Sequence[str], rows: Rows) -> str:
    lines = [[corner, *names], ["---"] * (len(names) + 1)]
    lines += [[key, *values] for key, values in rows.items()]
    return "\n".join("| " + " | ".join(map(as_text, line)) + " |" for line in lines)


def as_text(text: str) -> str:
    """Return `text` as one line of Markdown without HTML, links, images, emphasis, code or table cells."""
    words = " ".join(html.escape(text, quote=False).split())
    escaped = re.sub(r"[\\`*~$|\[\]]|(?<![^\W_])_|_(?![^\W_])|(?<=www)\.|:(?=//)", r"\\\g<0>", words)
    return f"&nbsp;&nbsp;{escaped}" if text.startswith(" ") else escaped  # leading blanks mean "of which"
