"""A run in a table: what was trained how, what it reached, and where a step's time went."""

from __future__ import annotations

from typing import Any

from .history import History
from .logs import duration
from .names import PUBLISH_PARTS, STEP_PARTS, accuracies

NONE = "-"


def summary_rows(run: History) -> dict[str, str]:
    """Quantity -> value, in the order of the table; the same keys for every run."""
    return {**_method(run), **_result(run), **_health(run), **_cost(run)}


def time_rows(run: History) -> dict[str, str]:
    """Part of the step -> seconds of a mean step and share of all steps."""
    steps = run.series("time/step_s")
    if not steps:
        return {}

    def inside(name: str) -> float:  # the first publish, for one, is before the first step
        part = run.series(name)
        return sum(value for step, value in zip(part.steps, part.values, strict=True) if step in counted)

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
    anchor, region = _anchor_and_region(run)

    def size(name: str) -> int:
        return max(1, run.setting(f"parallel.{name}", int) or 1)

    sizes = {"TP": "tensor", "PP": "pipeline", "VPP": "virtual_pipeline", "CP": "context", "EP": "expert"}
    split = [f"{short} {size(key)}" for short, key in sizes.items() if size(key) > 1]
    ranks = run.setting("parallel.world_size", int)
    model_ranks = size("tensor") * size("pipeline") * size("context")
    if ranks and ranks > model_ranks:
        split.append(f"DP {ranks // model_ranks}")
    layout = f"{ranks} rank{'s' if ranks != 1 else ''}" + (f": {', '.join(split)}" if split else "")
    sampled = [run.setting("rollout.prompts_per_step", int), run.setting("rollout.group_size", int)]
    if run.setting("objective.name", str) == "nll":
        sampled = sampled[:1]  # examples
    return {
        "method": _text(run.setting("objective.name", str)),
        "anchor": anchor,
        "trust region": region,
        "learning rate": _number(run.setting("optimizer.lr", int, float), "g"),
        "prompts x samples": " x ".join(map(_text, sampled)) if all(sampled) else NONE,
        "layout": layout if ranks else NONE,
    }


def _anchor_and_region(run: History) -> tuple[str, str]:
    """As the objective resolves them; from the settings alone when it is not one of this installation's."""
    name, given = run.setting("objective.name", str), run.setting("objective.settings", dict) or {}
    try:
        from dppo_megatron.objectives import build_objective

        s = build_objective(name, **given).settings
        if s.supervised or not s.has_region:
            return NONE, "none"
        if s.divergence == "ratio":
            threshold = f"ratio in [{1 - s.epsilon_low:g}, {1 + s.epsilon_high:g}]"
        else:
            threshold = f"{s.divergence.replace('_', ' ')}, delta {s.delta:g}"
        control = f", {s.control.replace('_', ' ')}"
        cap = "" if s.ratio_cap is None else f", ratio cap {s.ratio_cap:g}"
        return s.anchor, f"{threshold}{control}{cap}"
    except Exception:  # own objectives, older settings: the report must not depend on them
        shown = ", ".join(f"{key} {value}" for key, value in given.items() if key != "anchor")
        return _text(given.get("anchor")), shown or NONE


def _result(run: History) -> dict[str, str]:
    accuracy = run.series("eval/accuracy")
    reward = run.series("rollout/reward_mean")
    loss = run.series("train/loss")
    few = max(1, min(10, len(run.steps) // 4))
    best = max(zip(accuracy.values, accuracy.steps, strict=True), default=None)
    planned = run.setting("train.steps", int)
    last = max(run.steps, default=0)
    return {
        "steps": f"{last} of {planned}" if planned and planned != last else str(last),
        "accuracy before": _at(accuracy.values[:1], accuracy.steps[:1]),
        "accuracy after": _at(accuracy.values[-1:], accuracy.steps[-1:]) if len(accuracy.values) > 1 else NONE,
        "accuracy best": f"{best[0]:.1%} (step {best[1]})" if best else NONE,
        "reward first": _number(reward.at_start(few), ".3f", f" (mean of {few})"),
        "reward last": _number(reward.at_end(few), ".3f", f" (mean of {few})"),
        **_named_sets(run),
        "loss first, last": f"{_number(loss.at_start(few), '.2g')}, {_number(loss.at_end(few), '.2g')}",
    }


def _named_sets(run: History) -> dict[str, str]:
    rows = {}
    for name, label in accuracies({name for row in run.rows.values() for name in row}).items():
        series = run.series(name)
        if name != "eval/accuracy" and series:
            best = max(zip(series.values, series.steps, strict=True))
            ends = [_at(series.values[:1], series.steps[:1]), _at(series.values[-1:], series.steps[-1:])]
            rows[f"{label} first, last, best"] = ", ".join([*ends, _at(best[:1], best[1:])])
    return rows


def _health(run: History) -> dict[str, str]:
    shares = [run.series(f"policy/masked_share{sign}").mean for sign in ("", "_positive", "_negative")]
    skipped = run.series("train/skipped_updates").total
    overflowed = run.series("train/overflowed_updates").total
    return {
        "masked share": _number(shares[0], ".2%"),
        "  of A > 0, A < 0": f"{_number(shares[1], '.2%')}, {_number(shares[2], '.2%')}",
        "mismatch KL mean, max": _mean_and_max(run, "mismatch/kl"),
        "largest log-prob difference": _number(run.series("mismatch/max_abs_logprob_difference").max, ".1e"),
        "largest weight check difference": _number(run.series("probe/max_abs_logprob_difference").max, ".1e"),
        "grad norm mean, max": _mean_and_max(run, "train/grad_norm"),
        "groups without signal": _number(run.series("rollout/groups_without_signal").mean, ".1f", " a step"),
        "staleness": _number(run.series("rollout/staleness_mean").mean, ".2f", " versions"),
        "skipped updates": f"{skipped:.0f}" + (f", {overflowed:.0f} of them fp16 overflows" if overflowed else ""),
        "failed rewards": f"{run.series('rollout/reward_failed').total:.0f}",
    }


def _cost(run: History) -> dict[str, str]:
    seconds = run.series("time/step_s")
    rate = run.series("throughput/tokens_per_s")
    by_step = dict(zip(seconds.steps, seconds.values, strict=True))
    timed = [(value, by_step[step]) for step, value in zip(rate.steps, rate.values, strict=True) if step in by_step]
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


def _mean_and_max(run: History, name: str) -> str:
    series = run.series(name)
    return f"{_number(series.mean, '.2g')}, {_number(series.max, '.2g')}"


def _at(values: tuple[float, ...], steps: tuple[int, ...]) -> str:
    return f"{values[0]:.1%} (step {steps[0]})" if values else NONE


def _number(value: float | None, form: str, unit: str = "") -> str:
    return NONE if value is None else format(value, form) + unit


def _text(value: Any) -> str:
    return NONE if value is None else str(value)
