"""A finished run as a row: what it reached, whether it collapsed, how much was masked."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dppo_megatron.common.files import output, write_json
from dppo_megatron.observability.history import History, ReportError, load_history

from .grid import Cell, StudyFile

ROWS = "rows"


@dataclass(frozen=True, slots=True)
class Row:
    """`curve`: [step, value] of the study's metric. Values are None where the run recorded none."""

    method: str
    condition: str
    seed: int
    config: str  # hash
    status: str  # "done" | "failed"
    steps: int
    first: float | None
    final: float | None
    best: float | None
    collapsed: bool
    masked_share: float | None
    mismatch_kl: float | None
    seconds: float
    error: str  # last line of a run that failed
    curve: tuple[tuple[int, float], ...]


def make_row(cell: Cell, file: StudyFile, *, failed: str | None, seconds: float) -> Row:
    """Of a run that ended; `failed` says how if it did not complete. Raises `ReportError` if it lacks the metric."""
    try:
        history = load_history(cell.config.run.dir, cell.name)
    except ReportError:
        history = History(cell.name, {}, {}, ())
    metric = history.series(file.metric)
    if failed is None and not metric:
        names = ", ".join(sorted(history.names))
        raise ReportError(f"metric = {file.metric}: {cell.name} did not record it; name one of {names}")
    first, final, best = (metric.values[0], metric.values[-1], metric.max) if metric else (None, None, None)
    collapsed = failed is not None or (metric and not _held(metric.values, file.collapse))
    return Row(
        cell.method,
        cell.condition,
        cell.seed,
        cell.hash,
        "done" if failed is None else "failed",
        max(history.steps, default=0),
        first,
        final,
        best,
        bool(collapsed),
        history.series("policy/masked_share").mean,
        history.series("mismatch/kl").mean,
        round(seconds, 1),
        failed or "",
        tuple(zip(metric.steps, metric.values, strict=True)),
    )


def _held(values: Sequence[float], share: float) -> bool:
    """Whether a metric ended at its first value or above, and at this share of its best one where that is positive."""
    first, final, best = values[0], values[-1], max(values)
    return math.isfinite(final) and final >= max(first, share * best if best > 0 else first)


def read_rows(directory: Path) -> list[Row]:
    """All rows there are, by name."""
    found = []
    for path in sorted((directory / ROWS).glob("*.json")):
        tree = json.loads(path.read_text())
        found.append(Row(**{**tree, "curve": tuple(map(tuple, tree["curve"]))}))
    return found


def add_row(directory: Path, row: Row) -> None:
    """A file of its own, for the tasks of a job array add theirs at the same time."""
    (directory / ROWS).mkdir(parents=True, exist_ok=True)
    write_json(directory / ROWS / f"{row.method}--{row.condition}--seed-{row.seed}.json", asdict(row))


def write_tables(directory: Path, rows: list[Row]) -> None:
    """All rows without their curves, as table.csv and table.parquet."""
    import pyarrow
    from pyarrow import csv, parquet

    names = [field.name for field in fields(Row) if field.name != "curve"]
    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in names}
    table = pyarrow.table(columns)
    csv.write_csv(table, output(directory / "table.csv"))
    parquet.write_table(table, output(directory / "table.parquet"))
