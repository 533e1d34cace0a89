"""Trains the study runs that have no row yet, one after the other, on a shared engine where possible."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dppo_megatron.common.files import output
from dppo_megatron.common.process import Child, exit_reason
from dppo_megatron.config import save_resolved, with_settings
from dppo_megatron.errors import ExpectedError
from dppo_megatron.report.logs import duration, last_lines
from dppo_megatron.rollout.engines.guard.asgi import ROOTS_VARIABLE
from dppo_megatron.run.launch.driver import GRACE_S
from dppo_megatron.run.launch.local_processes import dppo_command
from dppo_megatron.run.launch.own_engines import running_engines
from dppo_megatron.run_dir import RunDir

from .grid import Cell, Study
from .rows import add_row, make_row, read_rows

POLL_S = 0.2
# Engines do not depend on these sections. Runs that differ in another section use separate engines.
NOT_THE_ENGINES = ("run", "objective", "optimizer", "train", "acceptance", "checkpoint", "eval", "tracking", "reward")


class StudyError(ExpectedError, RuntimeError):
    """Raised if a study cannot begin or continue."""


def missing(study: Study, directory: Path) -> list[Cell]:
    """Return the runs without a row. Raises `StudyError` for a row with other settings than the study file."""
    rows = {(row.method, row.condition, row.seed): row for row in read_rows(directory)}
    todo = []
    for cell in study.cells:
        row = rows.get((cell.method, cell.condition, cell.seed))
        if row is None:
            todo.append(cell)
        elif row.config != cell.hash:
            raise StudyError(
                f"{directory}: the row of {cell.name} has other settings ({row.config}, the study file gives "
                f"{cell.hash}); use another directory for the changed study"
            )
    return todo


def run_study(study: Study, directory: Path, say: Callable[[str], None], only: int | None = None) -> None:
    """Train the missing runs and add their rows. `only` selects a single run by number, from 0, for a job array.

    A failed run gets a row as well. A stopped run continues from its checkpoint. Raises `EngineStartError` when a
    shared engine does not start.
    """
    output(directory, directory=True)
    todo = missing(study, directory)
    if only is not None:
        if not 0 <= only < len(study.cells):
            raise StudyError(f"--only {only}: the study has runs 0 to {len(study.cells) - 1}")
        todo = [cell for cell in todo if cell is study.cells[only]]
    say(f"{len(study.cells)} runs, {len(todo)} to do{_expected(directory, len(todo))}")
    for cells in _by_engine(study, todo):
        with _shared_engine(cells, directory, say) as settings:
            for cell in cells:
                started = time.monotonic()
                failed = _train(cell, settings)
                row = make_row(cell, study.file, failed=failed, seconds=time.monotonic() - started)
                add_row(directory, row)
                todo.remove(cell)
                reached = "nothing" if row.final is None else f"{row.first:.3g} -> {row.final:.3g}"
                cause = f" ({row.error})" if failed else ""
                say(f"{cell.name}: {row.status}, {reached}{cause}; {len(todo)} to do{_expected(directory, len(todo))}")


def _expected(directory: Path, runs: int) -> str:
    seconds = [row.seconds for row in read_rows(directory)]
    return f", about {duration(runs * sum(seconds) / len(seconds))} left" if seconds and runs else ""


def _by_engine(study: Study, cells: Sequence[Cell]) -> list[list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        alone = not study.file.share_engine or not cell.config.samples or cell.config.engine.urls
        shared = cell.config.model_dump_json(exclude=set(NOT_THE_ENGINES))
        groups.setdefault(cell.name if alone else shared, []).append(cell)
    return list(groups.values())


@contextmanager
def _shared_engine(cells: Sequence[Cell], directory: Path, say: Callable[[str], None]) -> Iterator[list[str]]:
    """Yield the settings that make runs use shared engines, or no settings if each run starts engines itself."""
    config = cells[0].config
    if len(cells) == 1 or config.weight_sync.transport != "shared_storage":
        yield []
        return
    run = RunDir(directory / "engine")
    places = (directory, config.weight_sync.directory)
    roots = os.pathsep.join(str(place.absolute()) for place in places if place is not None)
    shutil.rmtree(run.root, ignore_errors=True)
    env = {**config.engine.env, ROOTS_VARIABLE: roots}
    config = with_settings(config, run={"dir": run.root.absolute()}, engine={"env": env})
    with running_engines(config) as urls:
        say(f"{len(cells)} runs share {len(urls)} engine{'s' if len(urls) > 1 else ''}")
        yield [f"engine.urls={json.dumps(urls)}", f"engine.secret_file={config.engine.secret_file or run.secret}"]


def _train(cell: Cell, settings: Sequence[str]) -> str | None:
    """Train a run to the end. Return why it failed, or None."""
    run = RunDir(cell.config.run.dir)
    resume = run.checkpoint_step is not None
    with run.take():  # a running run is an error, not a row
        if not resume:
            shutil.rmtree(run.root, ignore_errors=True)  # stopped before the first checkpoint
    run.make()
    config = run.root / "study-config.yaml"
    save_resolved(cell.config, config)
    command = dppo_command("train", str(config), *(["--resume"] if resume else []))
    for setting in settings:
        command += ["--set", setting]
    child = Child(cell.name, command, run.log("study"))
    try:
        while (code := child.poll()) is None:
            time.sleep(POLL_S)
    finally:
        child.end(GRACE_S)
    return None if code == 0 else (last_lines(child.log, 1) or [exit_reason(code)])[-1][:300]
