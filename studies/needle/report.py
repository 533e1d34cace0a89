"""Create every table and figure of the needle study from its stored rows.

python studies/needle/report.py    # from the root of the repository: results/report.md and docs/needle*.png
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import exp
from pathlib import Path
from statistics import mean

import pyarrow.compute as pc
import pyarrow.parquet as pq
from claims import (
    ARMS,
    CLAIMS,
    MAIN,
    NOISE,
    SECOND_ROUND,
    SEEDS,
    Claim,
    Curves,
    Verdict,
    differences,
    half,
    interval,
    lost,
    measured,
    reaches_half,
    verdicts,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dppo_megatron.lab.study.verdicts import Estimate

HERE = Path(__file__).parent
RESULTS, DOCS = HERE / "results", HERE.parents[1] / "docs"
sys.path.append(str(DOCS))
from draw_schemes import save_both  # noqa: E402

COLOURS = {
    "pg_is": "#999999",
    "grpo": "#CC79A7",
    "clip_higher": "#D55E00",
    "clip_higher_exempt": "#E69F00",
    "dppo_binary_tv": "#0072B2",
    "dppo_binary_kl": "#56B4E9",
    "tv_without_r": "#009E73",
}
NAMES = {
    "pg_is": "PG-IS, no trust region",
    "grpo": "GRPO",
    "clip_higher": "clip-higher",
    "clip_higher_exempt": "clip-higher, rare tokens free",
    "dppo_binary_tv": "DPPO, binary TV",
    "dppo_binary_kl": "DPPO, binary KL",
    "tv_without_r": "binary TV without the ratio",
}
SHOWN = {  # methods of the picture in README.md -> name and its place
    "pg_is": ("PG-IS, without\ntrust region", (1.05, 0.86)),
    "dppo_binary_tv": ("DPPO", (4.3, 0.77)),
    "grpo": ("GRPO", (5.85, 0.72)),
    "clip_higher": ("clip-higher", (7.6, 0.62)),
}

SEARCH = """Mean of the steps to half of two seeds, where a run that does not reach half counts as all its steps. In
parentheses: the mean of survivors, which reach half, and the number of failures. The rule chose the rate in bold."""


def main() -> None:
    search, judged = read_curves("search"), read_curves("judged")
    lines = ["# Needle: results", "", "## Search of the learning rates", "", SEARCH, "", *search_table(search)]
    lines += ["", "With rollouts up to 8 steps old:", "", *search_table(read_curves("search_stale"))]
    if judged:
        lines += ["", "## Runs", "", *cell_table(judged), "", "## Claims", "", *claim_table(CLAIMS, judged)]
        lines += ["", "## Second round", "", *claim_table(SECOND_ROUND, judged)]
        lines += ["", "## Arms without claims", "", *arm_table(judged), "", "## Masked tokens by mu", "", *mask_table()]
        print(save_both(partial(draw, judged), DOCS / "needle.png", dpi=110))
        print(save_both(partial(draw_details, judged), DOCS / "needle_details.png", dpi=110))
    (RESULTS / "report.md").write_text("\n".join(lines) + "\n")
    print(RESULTS / "report.md")


def read_curves(name: str) -> Curves:
    """Return the steps of every collected run of a study, in order."""
    path = RESULTS / name / "steps.parquet"
    curves = defaultdict(list)
    for row in pq.read_table(path).to_pylist() if path.exists() else ():
        curves[row["method"], row["condition"], row["seed"]].append(row)
    return {key: sorted(rows, key=lambda row: row["step"]) for key, rows in curves.items()}


def best_rates(search: Curves) -> dict[str, str]:
    """Return method -> the condition of its best learning rate: the smallest mean of `half`, then the smallest rate."""
    return {
        method: min(rates, key=lambda rate: (rates[rate], _rate(rate))) for method, rates in _halves(search).items()
    }


def search_table(search: Curves) -> Iterator[str]:
    """Yield a row for each method: the steps to half at each learning rate, the best one in bold."""
    halves, best = _halves(search), best_rates(search)
    rates = sorted({rate for of in halves.values() for rate in of}, key=_rate)
    yield f"| method | {' | '.join(rate.removeprefix('lr-') for rate in rates)} |"
    yield f"|---|{'---|' * len(rates)}"
    for method, of in halves.items():
        cells = []
        for rate in rates:
            curves = [curve for key, curve in search.items() if key[:2] == (method, rate)]
            cell = f"{of[rate]:.2f}" if rate in of else "-"
            cell = f"**{cell}**" if rate == best[method] else cell
            failed = sum(not reaches_half(curve) for curve in curves)
            cells.append(f"{cell} ({_steps(curves)}; {failed})" if failed else cell)
        yield f"| `{method}` | {' | '.join(cells)} |"


def _steps(curves: Sequence[Sequence[Mapping[str, float]]]) -> str:
    """Return the mean of `half` over the runs that reach it."""
    reached = [half(curve) for curve in curves if reaches_half(curve)]
    return f"{mean(reached):.2f}" if reached else "-"


def cell_table(judged: Curves) -> Iterator[str]:
    """Yield a row for each method and condition, with means over seeds; of the steps, over those that reach half."""
    head = "condition", "method", "seeds", "reached half", "their steps to half", "below 1 % at the last step"
    yield f"| {' | '.join((*head, 'right word, last step', 'tail, last 5 steps', 'masked'))} |"
    yield "|---|---|---|---|---|---|---|---|---|"
    cells = defaultdict(list)
    for (method, condition, _), curve in judged.items():
        cells[condition, method].append(curve)
    for (condition, method), curves in sorted(cells.items()):
        shown = [
            f"{sum(map(reaches_half, curves))}",
            _steps(curves),
            f"{sum(map(lost, curves))}",
            f"{mean(curve[-1]['needle'] for curve in curves):.3f}",
            f"{mean(measured(curve, 'tail') for curve in curves):.3f}",
            f"{mean(step['masked'] or 0 for curve in curves for step in curve):.2%}",
        ]
        yield f"| {condition} | `{method}` | {len(curves)} | {' | '.join(shown)} |"


def claim_table(claims: Sequence[Claim], judged: Curves) -> Iterator[str]:
    yield "| claim | measure | theirs / ours | failed, theirs and ours | of survivors | p | adjusted p | verdict |"
    yield "|---|---|---|---|---|---|---|---|"
    for claim, found in zip(claims, verdicts(claims, judged), strict=True):
        ours, theirs = (f"`{method}`" for method in (claim.ours[0], claim.theirs[0]))
        text = f"{claim.text} ({theirs} / {ours}, {claim.ours[1]})"
        if found is None:
            yield f"| {text} | {claim.measure} | - | - | - | - | - | not run |"
            continue
        cells = (_ratio(found), *_apart(claim, judged), f"{found.p:.1e}", f"{found.adjusted:.1e}", found.text)
        yield f"| {text} | {claim.measure} | {' | '.join(cells)} |"


def _ratio(found: Verdict | Estimate) -> str:
    return f"{exp(found.mean):.2f} [{exp(found.low):.2f}, {exp(found.high):.2f}]"


def _apart(claim: Claim, judged: Curves) -> tuple[str, str]:
    """Return the failures of both cells, and the ratio over the seeds in which both reach half."""
    if claim.measure == "tail":
        return "-", "-"
    failed = [
        str(sum(not reaches_half(curve) for key, curve in judged.items() if key[:2] == cell))
        for cell in (claim.theirs, claim.ours)
    ]
    alive = differences(claim, {key: curve for key, curve in judged.items() if reaches_half(curve)})
    return ", ".join(failed), f"{_ratio(interval(alive))} ({len(alive)})" if len(alive) > 2 else f"- ({len(alive)})"


def arm_table(judged: Curves) -> Iterator[str]:
    """Yield a row for each complete comparison of an arm without claims, and the effect of routing replay."""
    yield "| condition | compared | steps of theirs / ours | failed, theirs and ours | of survivors |"
    yield "|---|---|---|---|---|"
    ours = "dppo_binary_tv"
    pairs = [((ours, arm), (theirs, arm)) for arm in (MAIN, *ARMS) for theirs in ("clip_higher", "pg_is")]
    plain, replay = "experts", "experts-replay"
    pairs += [((method, replay), (method, plain)) for method in (ours, "clip_higher", "pg_is")]
    for own, other in pairs:
        claim = Claim("", own, other)
        found = differences(claim, judged)
        if len(found) == SEEDS:
            cells = [f"`{method}`" if own[1] == other[1] else f"`{method}`, {arm}" for method, arm in (other, own)]
            shown = " | ".join((_ratio(interval(found)), *_apart(claim, judged)))
            yield f"| {own[1]} | {' / '.join(cells)} | {shown} |"
    shares = [curve[0]["replay_disagreement"] for key, curve in judged.items() if key[1] == replay]
    if shares:
        yield ""
        yield f"In step 1 the trainer's router would not have chosen {mean(shares):.1%} of the replayed experts."


def mask_table() -> Iterator[str]:
    """Yield a row for each cell with masked tokens: their share in each bin of mu."""
    counts = _mask_counts()
    bins = sorted({mu for of in counts.values() for mu in of})
    yield f"| condition | method | {' | '.join(f'from {mu:g}' for mu in bins)} |"
    yield f"|---|---|{'---|' * len(bins)}"
    for (method, condition), of in sorted(counts.items(), key=lambda item: item[0][::-1]):
        if any(masked for masked, _ in of.values()):
            shares = (f"{of[mu][0] / of[mu][1]:.2%}" if mu in of else "-" for mu in bins)
            yield f"| {condition} | `{method}` | {' | '.join(shares)} |"


def draw(judged: Curves) -> Figure:
    """Draw the mean share of the right word of the four methods in SHOWN, each with its name at its line."""
    figure = Figure(figsize=(7.6, 3.4), layout="constrained")
    axes = figure.subplots()
    for method, (name, place) in SHOWN.items():
        means, _ = _by_step(judged, method, MAIN, "needle")
        axes.plot(range(1, len(means) + 1), means, color=COLOURS[method], lw=2.4)
        axes.annotate(name, place, fontsize=9)
    axes.set(xlabel="step (16 updates on one batch)", ylim=(0, 1.02), xlim=(1, None))
    axes.set_title("Samples with the right word, which 1 % have at the start; mean of eight seeds", fontsize=10)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_details(judged: Curves) -> Figure:
    figure = Figure(figsize=(9, 6.8), layout="constrained")
    (speed, doses), (tail, masks) = figure.subplots(2, 2)
    _draw_curves(speed, judged, MAIN, "needle")
    speed.set(xlabel="step (16 updates on one batch)", title="Share of the right word, f = 0.01", ylim=(0, 1))
    _draw_doses(doses, judged)
    doses.set(
        xscale="log", xlabel="f, start probability of the right word", title="Steps until half have the right word"
    )
    _draw_curves(tail, judged, NOISE, "tail")
    tail.set(xlabel="step", title="Share of rare words where rewards are a coin", ylim=(0, 1))
    _draw_masks(masks)
    masks.set(xscale="log", xlabel="mu, probability in the engine (lower edge of the bin)")
    masks.set(title="Masked tokens by their probability, f = 0.01")
    for axes in (speed, doses, tail, masks):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    for axes in (speed, tail, masks):
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


def _draw_curves(axes: Axes, judged: Curves, condition: str, name: str) -> None:
    """Draw the mean over seeds of each method in COLOURS, and a thin line for each seed."""
    for method, colour in COLOURS.items():
        means, values = _by_step(judged, method, condition, name)
        if means:
            steps = range(1, len(means) + 1)
            axes.plot(steps, means, color=colour, label=NAMES[method], lw=2.2)
            axes.plot(steps, values, color=colour, alpha=0.25, lw=0.6)


def _by_step(judged: Curves, method: str, condition: str, name: str) -> tuple[list[float], list[list[float]]]:
    """Return the mean of a metric over seeds at each step, and its values."""
    curves = [curve for key, curve in judged.items() if key[:2] == (method, condition)]
    values = [[step[name] for step in seeds] for seeds in zip(*curves, strict=False)]
    return list(map(mean, values)), values


def _draw_doses(axes: Axes, judged: Curves) -> None:
    for method, colour in COLOURS.items():
        halves = defaultdict(list)
        for (of, condition, _), curve in judged.items():
            if of == method and (dose := re.fullmatch(r"f-([\d.]+)", condition)):
                halves[float(dose[1])].append(half(curve))
        doses = sorted(halves)
        axes.plot(doses, [mean(halves[dose]) for dose in doses], "o-", color=colour, ms=4)


def _draw_masks(axes: Axes) -> None:
    """Draw the share of masked tokens by mu, over all steps and seeds."""
    counts = _mask_counts()
    for method, colour in COLOURS.items():
        of = counts.get((method, MAIN), {})
        bins = sorted(of)
        axes.plot([max(mu, 1e-5) for mu in bins], [of[mu][0] / of[mu][1] for mu in bins], "o-", color=colour, ms=4)


def _mask_counts() -> dict[tuple[str, str], dict[float, tuple[int, int]]]:
    """Return cell -> lower edge of the bin of mu -> masked tokens and tokens, of those with an advantage."""
    path = RESULTS / "judged" / "tokens.parquet"
    if not path.exists():
        return {}
    table = pq.read_table(path)
    table = table.filter(pc.not_equal(table["sign"], 0))
    sums = table.group_by(["method", "condition", "mu"]).aggregate([("masked", "sum"), ("tokens", "sum")])
    counts: dict[tuple[str, str], dict[float, tuple[int, int]]] = defaultdict(dict)
    for row in sums.to_pylist():
        counts[row["method"], row["condition"]][row["mu"]] = row["masked_sum"], row["tokens_sum"]
    return counts


def _halves(search: Curves) -> dict[str, dict[str, float]]:
    """Return method -> learning rate -> mean of `half`."""
    found: Mapping[str, Mapping[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (method, rate, _), curve in search.items():
        found[method][rate].append(half(curve))
    return {method: {rate: mean(values) for rate, values in of.items()} for method, of in sorted(found.items())}


def _rate(condition: str) -> float:
    return float(condition.removeprefix("lr-"))


if __name__ == "__main__":
    main()
