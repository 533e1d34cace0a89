"""Draws metric curves as small panels in one PNG. Several runs are overlaid, and empty panels are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo_megatron.errors import bounded

from .heldout import heldout_scores, score_format
from .history import History, Series
from .names import STEP_PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import RcKeyType

# Okabe and Ito's palette, which color-blind readers can distinguish, also in print; the last six are for more runs.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999",
           "#332288", "#117733", "#882255", "#8B5A2B", "#7FC97F", "#9467BD")  # fmt: skip
_GREY = "#666666"
_MASKED = "masked share of tokens"
_SIGNS = {"policy/masked_share_positive": "A > 0", "policy/masked_share_negative": "A < 0"}
CALLS = {
    "environment/turns_mean": "turns",
    "environment/calls_mean": "tool calls",
    "environment/call_errors_mean": "failed calls",
}
_STYLE: dict[RcKeyType, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#BBBBBB",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlesize": 10.5,
    "axes.labelsize": 9,
    "axes.labelcolor": _GREY,
    "grid.color": "#EEEEEE",
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.labelcolor": _GREY,
}


def draw_curves(runs: Sequence[History], path: Path) -> None:
    """Write the PNG. Colors distinguish the metrics of a single run, or the runs if there are several."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # unlike pyplot, this needs no display and has no global state
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    last = max(1, *(max(run.rows) for run in runs))
    with rc_context(_STYLE):
        figure = Figure(dpi=120, layout="constrained")
        panels: list[Any] = [figure.add_subplot() for _ in _PANELS]
        for axes, draw in zip(panels, _PANELS, strict=True):
            draw(axes, runs)
        shown_panels = [axes for axes in panels if axes.lines or axes.collections] or panels[:1]
        columns = 3 if len(shown_panels) <= 6 else 4
        lines = -(-len(shown_panels) // columns)
        figure.set_size_inches(4.17 * columns, 3.3 * lines)
        grid = figure.add_gridspec(lines, columns)
        for axes in set(panels) - set(shown_panels):
            axes.remove()
        for number, axes in enumerate(shown_panels):
            axes.set_subplotspec(grid[number])
            if axes.get_legend() is None and axes.get_legend_handles_labels()[1]:
                legend = axes.legend()
                for handle in legend.legend_handles if len(runs) > 1 else ():  # this line style stands for every run
                    handle.set_color(_GREY)
            axes.set_xlim(-0.015 * last, 1.015 * last)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            if number + columns >= len(shown_panels):
                axes.set_xlabel("step")
        if len(runs) > 1:
            handles = [Line2D([], [], color=_colour(i, len(runs)), lw=2.5) for i in range(len(runs))]
            names = [_title(run) for run in runs]
            figure.legend(handles, names, loc="outside upper center", ncols=min(columns, len(runs)))
        else:
            figure.suptitle(_title(runs[0]), fontsize=12, x=0.01, ha="left")
        figure.savefig(path, format="png")


def _title(run: History) -> str:
    method = run.setting("objective.name", str)
    title = f"{run.label}  ({method})" if method else run.label
    return bounded(title, 120).replace("$", r"\$")  # otherwise $ begins a formula


def _draw_reward(axes: Axes, runs: Sequence[History]) -> None:
    rewarded = any(run.series("rollout/reward_mean") for run in runs)
    axes.set_title("reward" if rewarded else "loss")
    _draw_metric(axes, runs, "rollout/reward_mean" if rewarded else "train/loss")


def _draw_heldout(axes: Axes, runs: Sequence[History], title: str, form: str) -> None:
    """Draw the held-out scores with format `form`: shares of right answers, or mean rewards."""
    axes.set_title(title)
    scores = heldout_scores(record for run in runs for record in run.rows.values())
    names = [name for name in scores if score_format(name) == form]
    for index, run in enumerate(runs):
        for number, name in enumerate(names):
            series = run.series(name)
            colour = _colour(number) if len(runs) == 1 else _colour(index, len(runs))
            shown = scores[name] if len(names) > 1 and index == 0 else None
            style = ("o-", "s--", "^:", "v-.")[number % 4]
            axes.plot(series.steps, series.values, style, color=colour, lw=1.8, ms=4, label=shown, clip_on=False)
    axes.margins(y=0.12)
    if form.endswith("%") and names:
        _percent_axis(axes)


def _draw_kinds(axes: Axes, runs: Sequence[History], title: str, kinds: dict[str, str]) -> None:
    """Draw the metrics in `kinds` (metric -> label). Colors distinguish a single run's metrics, else dashes do."""
    axes.set_title(title)
    for index, run in enumerate(runs):
        for number, (name, label) in enumerate(kinds.items()):
            colour = _colour(number) if len(runs) == 1 else _colour(index, len(runs))
            new = label not in axes.get_legend_handles_labels()[1]
            style = ("-", (0, (4, 2)), ":")[number]
            _draw_curve(axes, run.series(name), colour, label if new else None, style)
    if title == _MASKED:
        _percent_axis(axes)
    elif axes.lines:
        axes.set_ylim(bottom=0)


def _draw_mismatch(axes: Axes, runs: Sequence[History]) -> None:
    one = len(runs) == 1
    axes.set_title(f"engine-trainer mismatch ({'nats' if one else 'KL, nats'})")
    _draw_metric(axes, runs, "mismatch/kl", "KL" if one else None)
    if one:
        largest = runs[0].series("mismatch/max_abs_logprob_difference")
        _draw_curve(axes, largest, _colour(1), "largest log-prob difference")
    _wide_axis(axes)


def _draw_grad_norm(axes: Axes, runs: Sequence[History]) -> None:
    axes.set_title("gradient norm before clipping")
    _draw_metric(axes, runs, "train/grad_norm")
    _wide_axis(axes)


def _draw_time(axes: Axes, runs: Sequence[History]) -> None:
    """Draw how long each step took. A single run is drawn by part, with parts below 2 % in `other`."""
    axes.set_title("seconds per step")
    step = runs[0].series("time/step_s")
    if len(runs) > 1 or not step:
        return _draw_metric(axes, runs, "time/step_s")
    layers = {}
    for name in STEP_PARTS:
        part = dict(zip(*runs[0].series(name), strict=True))
        values = np.array([part.get(at, 0.0) for at in step.steps])
        if values.sum() > 0.02 * step.total:
            layers[name.removeprefix("time/").removesuffix("_s").replace("_", ", ")] = values
    colours = [*map(_colour, range(len(layers))), "#CCCCCC"]
    layers["other"] = np.maximum(np.array(step.values) - sum(layers.values()), 0.0)
    smooth = [_running_mean(values, len(values) // 25) for values in layers.values()]
    axes.stackplot(step.steps, smooth, labels=layers, colors=colours, alpha=0.85, lw=0)
    axes.set_ylim(0, 1.35 * np.sum(smooth, axis=0).max() or 1.0)  # room for the legend
    axes.legend(loc="upper left", ncols=3, handlelength=1.2)


_PANELS: tuple[Callable[[Axes, Sequence[History]], None], ...] = (
    _draw_reward,
    partial(_draw_heldout, title="held-out accuracy", form=".1%"),
    partial(_draw_heldout, title="held-out mean reward", form=".3f"),
    partial(_draw_kinds, title="turns and tool calls of a trajectory", kinds=CALLS),
    partial(_draw_kinds, title=_MASKED, kinds=_SIGNS),
    _draw_mismatch,
    _draw_grad_norm,
    _draw_time,
)


def _draw_metric(axes: Axes, runs: Sequence[History], name: str, label: str | None = None) -> None:
    for index, run in enumerate(runs):
        _draw_curve(axes, run.series(name), _colour(index, len(runs)), label)


def _draw_curve(axes: Axes, series: Series, colour: str, label: str | None = None, style: object = "-") -> None:
    """Draw the running mean, and behind it thin raw values if there are enough to be noisy."""
    window = len(series.values) // 25
    if window >= 2:
        axes.plot(series.steps, series.values, color=colour, lw=0.8, alpha=0.25)
    if series:
        marker = "o" if len(series.values) == 1 else None
        smooth = _running_mean(np.array(series.values), window if window >= 2 else 0)
        axes.plot(series.steps, smooth, color=colour, lw=1.7, ls=style, label=label, marker=marker)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean over up to `window` values on either side of each value."""
    near = np.ones(2 * window + 1)
    return np.convolve(values, near, "same") / np.convolve(np.ones_like(values), near, "same")


def _colour(index: int, count: int = 1) -> Any:
    """Return the color of curve `index`. All `count` curves have distinct colors."""
    if count <= len(PALETTE):
        return PALETTE[index % len(PALETTE)]
    from matplotlib import colormaps

    return colormaps["turbo"](index / (count - 1))


def _percent_axis(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(bottom=0)


def _wide_axis(axes: Axes) -> None:
    """Use a logarithmic axis if values span a factor above 30, else start at 0. A KL over few tokens can be below 0."""
    values = np.concatenate([line.get_ydata() for line in axes.lines] or [[]])
    positive = values[values > 0]
    if len(positive) and positive.max() > 30 * positive.min():
        axes.set_yscale("log", nonpositive="mask")
    elif len(values):
        axes.set_ylim(bottom=0)
