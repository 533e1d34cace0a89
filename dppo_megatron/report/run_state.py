"""Reads a run's state from the run directory, for `status`, `doctor` and `view`, and records starts and ends."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dppo_megatron.common.file_lock import FileLock
from dppo_megatron.common.files import append_json_line
from dppo_megatron.common.heartbeat import INTERVAL_S
from dppo_megatron.run_dir import RunDir

from .logs import duration, root_cause
from .names import is_step_record
from .tail import parse_lines, read_metrics, read_records, records_as, sparse

LATE_S = 6 * INTERVAL_S  # a process that wrote no heartbeat for this long is stopped, or its machine failed
Kind = Literal["new", "queued", "starting", "running", "waiting", "finished", "died", "paused"]
_AFTER: dict[str, Kind] = {
    "submitted": "queued", "requeued": "queued", "completed": "finished", "failed": "died", "stopped": "paused"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunAttempt:
    """Contains a start or end that `train` or a job recorded in restarts.jsonl."""

    time: float = 0.0
    event: str = ""
    cause: str = ""
    host: str = ""  # empty in job records


@dataclass(frozen=True, slots=True)
class Beat:
    """Contains a trainer rank's heartbeat, see `common/heartbeat.py`."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    since: float  # when it last made progress
    time: float
    call: str
    waits: bool  # whether it waits for other ranks


@dataclass(frozen=True, slots=True)
class RunState:
    kind: Kind
    step: int  # last recorded step
    reason: str = ""  # the awaited event, or the cause of the end

    def __str__(self) -> str:
        """Describe the state in words, for example `died at step 3: trainer-1: killed by SIGKILL`."""
        at = f" at step {self.step}" if self.kind in ("running", "died", "paused", "finished") else ""
        return f"{self.kind}{at}" + (f": {self.reason}" if self.reason else "")


def record_attempt(run: RunDir, event: str, cause: str) -> None:
    """Append the start or end of an attempt on this machine to restarts.jsonl. Jobs append to this file as well."""
    with contextlib.suppress(OSError):  # a full disk must not hide the cause
        about = {"cause": cause, "step": run.checkpoint_step, "host": socket.gethostname()}
        append_json_line(run.restarts, {"time": time.time(), "event": event} | about)


def run_state(run: RunDir, last_step: Mapping[str, Any] | None = None) -> RunState:
    """Return the state of a running or ended run, from files and locks only.

    `last_step` is the last step record in metrics.jsonl. If it is None, the file is read.
    """
    last = ([RunAttempt(), *records_as(RunAttempt, read_records(run.restarts))])[-1]
    if last_step is None:
        last_step = next(filter(is_step_record, reversed(read_metrics(run.metrics, sparse))), {})
    step, beats = last_step.get("step", 0), heartbeats(run)
    if last.event in _AFTER:
        return RunState(_AFTER[last.event], step, last.cause)
    elsewhere = last.host != socket.gethostname()  # file locks may work only within a machine
    alive = elsewhere and any(time.time() - beat.time < LATE_S for beat in beats)
    if not alive and not FileLock.is_held(run.lock):
        if last.event:  # an attempt started
            host = last.host or "a node"
            return RunState("died", step, f"the launcher on {host} was killed, its machine failed, or its disk is full")
        if run.final_model.exists() or not (last_step or run.logs.is_dir()):  # from a version that recorded no attempts
            return RunState("finished" if run.final_model.exists() else "new", step)
        logs = sorted(run.logs.glob("*.log"), key=lambda log: log.stat().st_mtime)  # a failed process writes first
        cause = next(filter(None, map(root_cause, logs)), None)
        return RunState("died", step, cause) if cause else RunState("paused", step)
    if hung := hang(beats, time.time()):
        return RunState("waiting", step, hung)
    engines = (log.stem for log in sorted(run.logs.glob("engine-*.log")) if log.stem[7:].isdecimal())
    loading = next((name for name in engines if not (run.services / f"{name}.json").exists()), "")
    if not last_step or last_step.get("time", 0.0) < last.time:
        waits = f"{loading or 'the trainer'} loads the model; see {run.log(loading or 'trainer-0')}"
        return RunState("starting", step, waits)
    if not beats or beats[0].phase != "wait":
        return RunState("running", step, f"{beats[0].phase} of step {beats[0].step}" if beats else "")
    event = f"rollouts of step {beats[0].step}, for {duration(time.time() - beats[0].since)}"
    return RunState("waiting", step, event + (f"; {loading} loads the model" if loading else ""))


def heartbeats(run: RunDir) -> list[Beat]:
    """Return the heartbeats of all trainer ranks, in rank order. Skips a heartbeat that is being written."""
    beats: list[Beat] = []
    for path in run.heartbeats.glob("trainer-*"):
        with contextlib.suppress(OSError):
            rank = {"rank": path.name.rpartition("-")[2]}
            beats += records_as(Beat, (beat | rank for beat in parse_lines(path.read_bytes().splitlines())))
    return sorted(beats, key=lambda beat: beat.rank)


class HeartbeatReader:
    """Reads a run's heartbeats often, and dates them by this machine's clock, because node clocks may differ."""

    def __init__(self, run: RunDir):
        self._run = run
        self._dates: dict[int, tuple[float, float]] = {}  # rank -> time in the newest heartbeat, when it was first read

    def read(self) -> list[Beat]:
        beats = heartbeats(self._run)
        for beat in beats:
            if self._dates.get(beat.rank, (0.0, 0.0))[0] != beat.time:
                self._dates[beat.rank] = beat.time, time.time()
        dates = [self._dates[beat.rank][1] for beat in beats]
        return [replace(b, time=d, since=d - (b.time - b.since)) for b, d in zip(beats, dates, strict=True)]


def hang(beats: Sequence[Beat], now: float, longest_s: float = LATE_S) -> str:
    """Name the ranks without a heartbeat for `longest_s`, else the ranks without progress that others wait for.

    In phase `wait`, lack of progress does not count: rank 0 waits for engines and rollouts, which have other limits.
    """
    silent = [beat for beat in beats if now - beat.time > longest_s]
    waiting = [beat for beat in beats if beat not in silent and (silent or beat.waits)]
    # A stopped rank is not busy, although the phase began before the last heartbeat: it becomes silent a little later.
    fresh = [beat for beat in beats if now - beat.time <= longest_s / 2]
    busy = [beat for beat in fresh if not beat.waits and beat.phase != "wait" and waiting]
    late = silent or [beat for beat in busy if now - beat.since > longest_s]
    about = "shows no sign of life" if silent else "does not advance"
    parts = [
        f"rank {beat.rank} (process {beat.pid} on {beat.host}) {about} for "
        f"{duration(now - (beat.time if silent else beat.since))}, in {beat.phase} of step {beat.step}, {beat.call}"
        for beat in late[:4]
    ]
    calls = {f"{beat.phase}, {beat.call}" for beat in waiting} if late else ()
    for call in sorted(calls)[:4]:
        ranks = [str(beat.rank) for beat in waiting if f"{beat.phase}, {beat.call}" == call]
        parts.append(
            f"rank {ranks[0]} waits in {call}" if len(ranks) == 1 else f"ranks {', '.join(ranks[:8])} wait in {call}"
        )
    return "; ".join(parts)
