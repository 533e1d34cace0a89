"""The curves of one run, or of several laid over each other: six small panels in one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .history import History, Series
from .names import STEP_PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart by colour-blind readers and in print.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_GREY = "#666666"


def draw_curves(runs: Sequence[History], path: Path) -> None:
    """Writes the PNG. One run: colours tell quantities apart; several: they tell runs apart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(12.5, 6.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no pyplot state
    panels = figure.subplots(2, 3)
    last = max(1, *(max(run.rows) for run in runs))
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    for axes, draw in zip(panels.flat, (_reward, _accuracy, _masked, _mismatch, _grad_norm, _time), strict=True):
        _style(axes)
        draw(axes, runs)
        _finish(axes)
        axes.set_xlim(-0.015 * last, 1.015 * last)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for axes in panels[1]:
        axes.set_xlabel("step", color=_GREY, fontsize=9)
    if len(runs) > 1:
        lines = [Line2D([], [], color=_colour(i), lw=2.5) for i in range(len(runs))]
        names = [_title(run) for run in runs]
        figure.legend(lines, names, loc="outside upper center", ncols=min(4, len(runs)), frameon=False)
    else:
        figure.suptitle(_title(runs[0]), fontsize=12, x=0.01, ha="left")
    figure.savefig(path)


def _title(run: History) -> str:
    method = run.setting("objective.name")
    return f"{run.label}  ({method})" if method else run.label


def _reward(axes: Axes, runs: Sequence[History]) -> None:
    name = "rollout/reward_mean" if any(run.series("rollout/reward_mean") for run in runs) else "train/loss"
    axes.set_title("reward" if name.startswith("rollout") else "loss")
    for index, run in enumerate(runs):
        _curve(axes, run.series(name), _colour(index))


def _accuracy(axes: Axes, runs: Sequence[History]) -> None:
    axes.set_title("held-out accuracy, greedy")
    axes.margins(y=0.12)
    _percent_axis(axes)
    for index, run in enumerate(runs):
        series = run.series("eval/accuracy")
        if not series:
            continue
        axes.plot(series.steps, series.values, "o-", color=_colour(index), lw=1.8, ms=4)
        if len(runs) == 1:
            _annotate(axes, series.steps[0], series.values[0], (8, -4), "left")
            if len(series.values) > 1:
                _annotate(axes, series.steps[-1], series.values[-1], (0, 7), "right")


def _masked(axes: Axes, runs: Sequence[History]) -> None:
    axes.set_title("masked share of tokens")
    _percent_axis(axes)
    signs = (("positive", "A > 0", "-"), ("negative", "A < 0", (0, (4, 2))))
    for index, run in enumerate(runs):
        for number, (sign, label, style) in enumerate(signs):
            colour = _colour(number if len(runs) == 1 else index)
            series = run.series(f"policy/masked_share_{sign}")
            _curve(axes, series, colour, label=label if len(runs) == 1 else None, style=style)
    if axes.lines:
        axes.set_ylim(bottom=0)
        if len(runs) > 1:
            for _, label, style in signs:
                axes.plot([], [], color=_GREY, ls=style, label=label)


def _mismatch(axes: Axes, runs: Sequence[History]) -> None:
    axes.set_title("engine-trainer mismatch (nats)" if len(runs) == 1 else "engine-trainer mismatch (KL, nats)")
    for index, run in enumerate(runs):
        _curve(axes, _positive(run.series("mismatch/kl")), _colour(index), label="KL" if len(runs) == 1 else None)
    if len(runs) == 1:
        largest = _positive(runs[0].series("mismatch/max_abs_logprob_difference"))
        _curve(axes, largest, _colour(1), label="largest log-prob difference")
    _wide_axis(axes)


def _grad_norm(axes: Axes, runs: Sequence[History]) -> None:
    axes.set_title("gradient norm before clipping")
    for index, run in enumerate(runs):
        _curve(axes, _positive(run.series("train/grad_norm")), _colour(index))
    _wide_axis(axes)


def _time(axes: Axes, runs: Sequence[History]) -> None:
    axes.set_title("seconds per step")
    if len(runs) > 1:
        for index, run in enumerate(runs):
            _curve(axes, run.series("time/step_s"), _colour(index))
        return
    (run,) = runs
    step = run.series("time/step_s")
    if not step:
        return
    parts = {name: _on_steps(run.series(name), step.steps) for name in STEP_PARTS}
    shown = {name: values for name, values in parts.items() if sum(values) > 0.02 * step.total}
    known = [sum(column) for column in zip(*shown.values(), strict=True)] or [0.0] * len(step.steps)
    layers = [
        *shown.values(),
        [max(0.0, whole - part) for whole, part in zip(step.values, known, strict=True)],
    ]
    names = [*(name.removeprefix("time/").removesuffix("_s").replace("_", ", ") for name in shown), "other"]
    colours = [*(_colour(i) for i in range(len(shown))), "#CCCCCC"]
    window = len(step.steps) // 25
    smooth = [_running_mean(layer, window) for layer in layers]
    axes.stackplot(step.steps, smooth, labels=names, colors=colours, alpha=0.85, lw=0)
    top = max(map(sum, zip(*smooth, strict=True)))
    axes.set_ylim(0, 1.35 * top or 1.0)  # room for the legend
    axes.legend(loc="upper left", ncols=3, frameon=False, fontsize=8.5, labelcolor=_GREY, handlelength=1.2)


def _on_steps(series: Series, steps: Sequence[int]) -> list[float]:
    values = dict(zip(series.steps, series.values, strict=True))
    return [values.get(step, 0.0) for step in steps]


def _curve(axes: Axes, series: Series, colour: str, label: str | None = None, style: object = "-") -> None:
    """Thin raw values behind their running mean, where there are enough to be noisy."""
    if not series:
        return
    window = len(series.values) // 25
    if window >= 2:
        axes.plot(series.steps, series.values, color=colour, lw=0.8, alpha=0.25)
        axes.plot(series.steps, _running_mean(series.values, window), color=colour, lw=1.8, ls=style, label=label)
    else:
        marker = "o" if len(series.values) == 1 else None
        axes.plot(series.steps, series.values, color=colour, lw=1.6, ls=style, label=label, marker=marker)


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    means = []
    for at in range(len(values)):
        near = values[max(0, at - window) : at + window + 1]
        means.append(sum(near) / len(near))
    return means


def _positive(series: Series) -> Series:
    """What a logarithmic axis can show; a KL estimated from few tokens can come out at or below 0."""
    pairs = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if v > 0]
    return Series(tuple(s for s, _ in pairs), tuple(v for _, v in pairs))


def _annotate(axes: Axes, x: float, y: float, offset: tuple[float, float], align: str) -> None:
    axes.annotate(f"{y:.1%}", (x, y), offset, textcoords="offset points", ha=align, fontsize=9, color=_GREY)


def _colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def _percent_axis(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")


def _wide_axis(axes: Axes) -> None:
    """From zero; logarithmic where the values span more than that can show."""
    from matplotlib.ticker import LogLocator, NullLocator

    values = [value for line in axes.lines for value in line.get_ydata()]
    if values and max(values) > 30 * min(values):
        axes.set_yscale("log")
        subs = (1.0, 2.0, 5.0) if max(values) < 300 * min(values) else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_minor_locator(NullLocator())
    elif values:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#BBBBBB")
    axes.grid(axis="y", color="#EEEEEE", lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_GREY, labelsize=8.5, length=0)
    axes.title.set_fontsize(10.5)


def _finish(axes: Axes) -> None:
    """Legend where there is something to tell apart; a word where there is nothing to see."""
    if not axes.lines and not axes.collections:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color="#999999")
    elif axes.get_legend() is None and axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=_GREY)
