"""A run's status as tables for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dppo_megatron.observability.logs import duration

from .status import Status

SHOWN = {
    "rollout/reward_mean": ("reward", "{:.3f}"),
    "policy/masked_share": ("masked by the trust region", "{:.2%}"),
    "mismatch/kl": ("engine-trainer mismatch KL", "{:.1e}"),
    "train/grad_norm": ("gradient norm", "{:.3g}"),
    "throughput/tokens_per_s": ("tokens/s", "{:,.0f}"),
    "throughput/mfu": ("MFU", "{:.1%}"),
    "time/step_s": ("seconds a step", "{:.1f}"),
}


def show(status: Status, console: Console | None = None) -> None:
    console = console or Console()
    console.print(_head(status))
    if status.jobs:
        console.print(_table("jobs", ["id", "name", "state", "reason", "nodes", "time left"], [
            (j.id, j.name, j.state, j.reason if j.reason != "None" else "", j.nodes, j.time_left) for j in status.jobs
        ]))  # fmt: skip
    if status.engines:
        rows = [(e.name, e.host, e.url, e.health) for e in status.engines]
        console.print(_table("engines", ["name", "host", "url", "health"], rows))
    if status.errors:
        rows = [(e.log, duration(e.age_s), e.line) for e in status.errors]
        console.print(_table("last error of each log", ["log", "written ago", "line"], rows))


def _head(status: Status) -> Table:
    of = "" if status.steps is None else f" of {status.steps}"
    rows = [("step", f"{status.step}{of}")]
    rows += [
        (label, form.format(status.metrics[name]))
        for name, (label, form) in SHOWN.items()
        if isinstance(status.metrics.get(name), int | float)
    ]
    if status.accuracy is not None:
        rows.append(("held-out accuracy", f"{status.accuracy:.1%}"))
    rows.append(("last record", "none" if status.updated_s is None else f"{duration(status.updated_s)} ago"))
    rows.append(("checkpoint", "none" if status.checkpoint is None else f"step {status.checkpoint}"))
    if status.policy_version is not None:
        rows.append(("published policy", f"version {status.policy_version}"))
    rows.append(("restarts", str(status.restarts) + (f", last: {status.last_event}" if status.last_event else "")))
    if status.excluded_nodes:
        rows.append(("excluded nodes", ", ".join(status.excluded_nodes)))
    if status.queue_note:
        rows.append(("queue", status.queue_note))
    return _table(status.run, None, rows)


def _table(title: str, columns: list[str] | None, rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=Text(title), title_justify="left", show_header=columns is not None)
    for column in columns or ("", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
