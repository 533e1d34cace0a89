"""Reads the settings and per-step metrics of a finished or running run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dppo_megatron.config import ConfigError, read_tree
from dppo_megatron.errors import ExpectedError
from dppo_megatron.run_dir import RunDir, run_below

from .names import is_step_record
from .tail import read_metrics, read_records


class ReportError(ExpectedError, ValueError):
    """Raised if there is nothing to report on."""


class Series(NamedTuple):
    """Contains a metric's values at the steps that recorded a finite value."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def total(self) -> float:
        return math.fsum(self.values)

    @property
    def mean(self) -> float | None:
        return self.total / len(self.values) if self.values else None

    @property
    def max(self) -> float | None:
        return max(self.values, default=None)

    def at_start(self, count: int) -> float | None:
        """Return the mean of the first `count` values."""
        return Series(self.steps[:count], self.values[:count]).mean

    def at_end(self, count: int) -> float | None:
        return Series(self.steps[-count:], self.values[-count:]).mean


@dataclass(frozen=True)
class History:
    """Contains the records of one run.

    `rows` maps steps to metrics, for example {3: {"train/loss": 0.2}}. `config` is the resolved config as plain YAML,
    possibly from another version of the package.
    """

    label: str
    config: dict[str, Any]
    rows: dict[int, dict[str, float | None]]
    times: tuple[float, ...]  # Unix seconds of the records, in file order
    masked: tuple[dict[str, Any], ...] = ()  # most masked tokens per step
    last_step: dict[str, Any] | None = None  # last step record in file order

    def series(self, name: str) -> Series:
        points = {step: value for step, row in sorted(self.rows.items()) if (value := row.get(name)) is not None}
        return Series(tuple(points), tuple(points.values()))

    @property
    def names(self) -> set[str]:
        """Return the names of all recorded metrics."""
        return {name for row in self.rows.values() for name in row}

    @property
    def steps(self) -> list[int]:
        return sorted(step for step, row in self.rows.items() if is_step_record(row))

    def setting(self, dotted: str, *kinds: type) -> Any:
        """Return a setting of the resolved config, or None if it is absent or has none of the types `kinds`."""
        node: Any = self.config
        for key in dotted.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        return node if not kinds or type(node) in kinds else None


def load_history(run_dir: Path, label: str) -> History:
    """Read a run's metrics and settings. Raises ReportError if the run has recorded nothing."""
    run, times = RunDir(run_dir), []
    rows: dict[int, dict[str, float | None]] = {}
    last_step: dict[str, Any] | None = None
    for record in read_metrics(run.metrics):
        values = {name: value for name, value in record.items() if name not in ("step", "time")}
        rows.setdefault(record["step"], {}).update(values)
        if "time" in record:
            times.append(float(record["time"]))
        if is_step_record(record):
            last_step = record
    if not rows:
        meant = run_below(run_dir)
        raise ReportError(f"{run.metrics} has no metrics: name the directory of a run that trained{meant}")
    masked = tuple(read_records(run.masked_tokens))
    return History(label, read_settings(run_dir), rows, tuple(times), masked, last_step)


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Read the run's config; return an empty tree if it is absent or damaged, because the curves do not need it."""
    path = RunDir(run_dir).config
    try:
        return read_tree(path)[0] if path.is_file() else {}
    except ConfigError:
        return {}


def labels(run_dirs: Sequence[Path]) -> list[str]:
    """Return the directory names, with as many parent directories as make them unique.

    Example: sweep/a/run and sweep/b/run get the labels a/run and b/run.
    """
    paths = [path.resolve().parts for path in run_dirs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{parts[-1]} ({index})" for index, parts in enumerate(paths, 1)]
