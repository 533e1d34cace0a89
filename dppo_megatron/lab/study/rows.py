"""Stores a finished run as a row with the result, whether the run collapsed, and the masked share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dppo_megatron.common.files import output, parse_as, write_json
from dppo_megatron.objectives.settings import nearest
from dppo_megatron.report.history import History, ReportError, load_history

from .grid import Cell, StudyFile

ROWS = "rows"


@dataclass(frozen=True, slots=True)
class StudyRow:
    """Contains a run's result. `curve` has (step, value) pairs of the study metric. Unrecorded values are None."""

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
    error: str  # last log line of a failed run
    curve: tuple[tuple[int, float], ...]


def make_row(cell: Cell, file: StudyFile, *, failed: str | None, seconds: float) -> StudyRow:
    """Return the row of an ended run. `failed` is why it failed, or None.

    Raises `ReportError` if a completed run did not record the metric.
    """
    try:
        history = load_history(cell.config.run.dir, cell.name)
    except ReportError:
        history = History(cell.name, {}, {}, ())
    metric = history.series(file.metric)
    if failed is None and not metric:
        raise ReportError(
            f"metric = {file.metric}: {cell.name} did not record it; {nearest(file.metric, history.names)}"
        )
    values = metric.values or (None,)
    return StudyRow(
        method=cell.method,
        condition=cell.condition,
        seed=cell.seed,
        config=cell.hash,
        status="done" if failed is None else "failed",
        steps=max(history.steps, default=0),
        first=values[0],
        final=values[-1],
        best=metric.max,
        collapsed=failed is not None or (bool(metric) and not _recovered(metric.values, file.collapse)),
        masked_share=history.series("policy/masked_share").mean,
        mismatch_kl=history.series("mismatch/kl").mean,
        seconds=round(seconds, 1),
        error=failed or "",
        curve=tuple(zip(*metric, strict=True)),
    )


def _recovered(values: Sequence[float], share: float) -> bool:
    """Return whether the last value reaches the first value and, if the best is positive, `share` of the best."""
    first, final, best = values[0], values[-1], max(values)
    return math.isfinite(final) and final >= max(first, share * best if best > 0 else first)


def read_rows(directory: Path) -> list[StudyRow]:
    """Read all rows, sorted by name. Raises `DamagedFile` with the path of a file that is not a row."""
    return [parse_as(StudyRow, path.read_bytes(), path) for path in sorted((directory / ROWS).glob("*.json"))]


def add_row(directory: Path, row: StudyRow) -> None:
    """Write the row to a separate file, because job array tasks write concurrently."""
    (directory / ROWS).mkdir(parents=True, exist_ok=True)
    write_json(directory / ROWS / f"{row.method}--{row.condition}--seed-{row.seed}.json", asdict(row))


def write_tables(directory: Path, rows: list[StudyRow]) -> None:
    """Write all rows, without curves, to table.csv and table.parquet."""
    import pyarrow
    from pyarrow import csv, parquet

    names = [field.name for field in fields(StudyRow) if field.name != "curve"]
    table = pyarrow.table({name: [getattr(row, name) for row in rows] for name in names})
    csv.write_csv(table, output(directory / "table.csv"))
    parquet.write_table(table, output(directory / "table.parquet"))
