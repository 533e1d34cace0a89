"""`dppo-megatron status`: reads a run's state from the run directory, the queue and the engines that answer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dppo_megatron.config import Config, ConfigError
from dppo_megatron.errors import ExpectedError, bounded
from dppo_megatron.report.heldout import heldout_scores, score_format
from dppo_megatron.report.logs import duration, last_error, last_lines
from dppo_megatron.report.names import is_step_record
from dppo_megatron.report.run_state import run_state
from dppo_megatron.report.tail import read_metrics, sparse
from dppo_megatron.rollout.engines.kinds import build_engine
from dppo_megatron.rollout.engines.protocol import EngineError
from dppo_megatron.rollout.fleet.engine_checks import check_health
from dppo_megatron.rollout.fleet.registry import Service, engine_services
from dppo_megatron.run.checks import load_config
from dppo_megatron.run_dir import RunDir, run_below
from dppo_megatron.weights.published import PublishedPolicy

from . import queue
from .attempts import AttemptLog

HEALTH_TIMEOUT_S = 3.0
SEARCHED_LINES = 400
LONGEST_LINE = 500  # bytes
SHOWN = {
    "rollout/reward_mean": ("reward", "{:.3f}"),
    "policy/masked_share": ("masked by the trust region", "{:.2%}"),
    "mismatch/kl": ("engine-trainer mismatch KL", "{:.1e}"),
    "train/grad_norm": ("gradient norm", "{:.3g}"),
    "throughput/tokens_per_s": ("tokens/s", "{:,.0f}"),
    "throughput/mfu": ("MFU", "{:.1%}"),
    "time/step_s": ("seconds a step", "{:.1f}"),
}


class NotARun(ExpectedError, ValueError):
    """Raised when the directory has no run."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    name: str
    host: str
    url: str
    health: str  # "answers", or why it does not


@dataclass(frozen=True, slots=True)
class LastError:
    log: str
    line: str
    age_s: float  # time since the last write to the log


@dataclass(frozen=True, slots=True)
class Status:
    run: str
    state: str  # such as running, waiting, died
    state_text: str  # with the awaited event, or the cause of the end
    step: int
    steps: int | None
    metrics: dict[str, float]  # metrics of the last training step
    heldout: dict[str, float]  # held-out metric -> last score
    updated_s: float | None  # age of the last record
    checkpoint: int | None
    policy_version: int | None  # published
    engines: list[EngineStatus]
    jobs: list[queue.QueuedJob]
    queue_note: str  # why squeue failed, or why no job is in the queue
    restarts: int
    excluded_nodes: list[str]
    last_event: str
    errors: list[LastError]


def read_status(directory: Path) -> Status:
    """Read the run's files and query each engine and squeue once, without changes. Raises `NotARun`."""
    run = RunDir(directory)
    if (meant := run_below(directory)) or not run.config.is_file():
        raise NotARun(
            f"{directory}: no run with a {run.config.name}; name the run.dir of a run that was started{meant}"
        )
    config = _config(run)
    records = read_metrics(run.metrics, sparse)
    last: dict[str, Any] = next(filter(is_step_record, reversed(records)), {})
    published = PublishedPolicy.read(run.published)
    attempts, state = AttemptLog(run), run_state(run, last)
    events = attempts.events()
    jobs, note = _jobs(list(dict.fromkeys(event.job for event in events)))
    if state.kind == "died" and any(job.state == "PENDING" for job in jobs):  # Slurm requeued it after a lost node
        state = replace(state, kind="queued")
    return Status(
        run=str(directory),
        state=state.kind,
        state_text=str(state),
        step=last.get("step", 0),
        steps=config.train.steps if config else None,
        metrics={name: value for name, value in last.items() if name not in ("step", "time")},
        heldout={name: [record[name] for record in records if name in record][-1] for name in heldout_scores(records)},
        updated_s=next((time.time() - r["time"] for r in reversed(records) if "time" in r), None),
        checkpoint=run.checkpoint_step,
        policy_version=published.version if published else None,
        engines=asyncio.run(_engines(config, run)) if config else [],
        jobs=jobs,
        queue_note=note,
        restarts=attempts.restarts(),
        excluded_nodes=attempts.excluded(),
        last_event=f"{events[-1].event} ({events[-1].cause})" if events else "",
        errors=_errors(run),
    )


def _config(run: RunDir) -> Config | None:
    """Return the config, or None if another version of this program wrote it. The other parts are still shown."""
    try:
        return load_config(run.config)
    except ConfigError:
        return None


def _jobs(job_ids: list[str]) -> tuple[list[queue.QueuedJob], str]:
    if not job_ids:
        return [], ""
    try:
        jobs = queue.jobs(job_ids)
    except queue.SlurmError as error:
        return [], str(error).splitlines()[-1]
    return jobs, "" if jobs else f"job {job_ids[-1]} is not in the queue"


async def _engines(config: Config, run: RunDir) -> list[EngineStatus]:
    async def check(service: Service) -> EngineStatus:
        if "//127.0.0.1:" in service.url and service.host not in ("", socket.gethostname()):
            return EngineStatus(service.name, service.host, service.url, "reachable only from its own node")
        engine = build_engine(config, service.url)
        try:
            await check_health(engine, config, HEALTH_TIMEOUT_S)
            health = "answers"
        except EngineError as error:
            health = f"does not answer: {error}".replace(f"engine {engine.url}: ", "")
        finally:
            await engine.close()
        return EngineStatus(service.name, service.host, service.url, health)

    return list(await asyncio.gather(*map(check, engine_services(config, run).values())))


def _errors(run: RunDir) -> list[LastError]:
    """Return the last error-like line in each log, newest log first."""
    errors = []
    for log in run.logs.glob("*.[lo][ou][gt]"):
        if (line := last_error(last_lines(log, SEARCHED_LINES))) is not None:
            errors.append(LastError(log.name, bounded(line, LONGEST_LINE), time.time() - log.stat().st_mtime))
    return sorted(errors, key=lambda error: error.age_s)


def show(status: Status, console: Console | None = None) -> None:
    """Print the status as tables."""
    console = console or Console()
    console.print(_head(status))
    if status.jobs:
        jobs = [astuple(replace(job, reason="") if job.reason == "None" else job) for job in status.jobs]
        console.print(_table("jobs", ["id", "name", "state", "reason", "nodes", "time left"], jobs))
    if status.engines:
        console.print(_table("engines", ["name", "host", "url", "health"], map(astuple, status.engines)))
    if status.errors:
        errors = [(e.log, duration(e.age_s), e.line) for e in status.errors]
        console.print(_table("last error of each log", ["log", "written ago", "line"], errors))


def _head(status: Status) -> Table:
    suffix = "" if status.steps is None else f" of {status.steps}"
    rows = [("state", status.state_text), ("step", f"{status.step}{suffix}")]
    rows += [
        (label, form.format(status.metrics[name]))
        for name, (label, form) in SHOWN.items()
        if isinstance(status.metrics.get(name), int | float)
    ]
    for name, score in status.heldout.items():
        rows.append((f"held-out {name.removeprefix('eval/')}", format(score, score_format(name))))
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


def _table(title: str, columns: list[str] | None, rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(title=Text(title), title_justify="left", show_header=columns is not None)
    for column in columns or ("", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
