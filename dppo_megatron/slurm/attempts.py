"""Records each attempt of a run's jobs in restarts.jsonl: its start, its end and the restart decision."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import StringConstraints

from dppo_megatron.common.files import append_json_line
from dppo_megatron.observability.tail import read_records, records_as
from dppo_megatron.run_dir import RunDir

TIME_LIMIT = "time limit"
LOST = "ended by Slurm: a node failed, or the job was preempted or requeued by hand"

Event = Literal["submitted", "started", "requeued", "failed", "stopped", "completed"]


@dataclass(frozen=True, slots=True)
class AttemptEvent:
    time: float  # unix seconds
    job: Annotated[str, StringConstraints(pattern=r"^\d+(_\d+)?$")]  # JOB_TASK for an array
    restart: int  # Slurm's count of this job's restarts
    event: Event
    cause: str  # why the attempt began or ended
    step: int | None  # step of the newest checkpoint; None before the first
    nodes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  # nodes that the job's later attempts avoid


class AttemptLog:
    """Appends to the file and reads it. One process writes at a time: the job's driver or the submitting command."""

    def __init__(self, run: RunDir):
        self._run = run

    def record(self, event: Event, cause: str, *, job: str, restart: int, **nodes: tuple[str, ...]) -> None:
        """Append a record. `nodes` are the fields `nodes` and `excluded` of the event."""
        self._run.make()
        entry = AttemptEvent(time.time(), job, restart, event, cause, self._run.checkpoint_step, **nodes)
        append_json_line(self._run.restarts, asdict(entry))

    def events(self) -> list[AttemptEvent]:
        return records_as(AttemptEvent, read_records(self._run.restarts))

    def why_restarted(self) -> str:
        """Return the cause that the previous attempt recorded, or `LOST` if it could not record one."""
        events = self.events()
        return events[-1].cause if events and events[-1].event == "requeued" else LOST

    def without_progress(self) -> int:
        """Return the number of consecutive attempts, including this one, that began at the newest checkpoint.

        None of these attempts saved another checkpoint, for any cause. The count restarts when the run is submitted
        again.
        """
        now, count = self._run.checkpoint_step, 0
        for start in reversed([e for e in self.events() if e.event == "started"]):
            if start.step != now:
                break
            count += 1
            if start.restart == 0:
                break
        return count

    def excluded(self) -> list[str]:
        """Return the nodes that the newest job avoids, as found by its attempts."""
        events = self.events()
        return sorted({node for event in events if event.job == events[-1].job for node in event.excluded})

    def restarts(self) -> int:
        """Return how often an attempt followed another of the same job."""
        return sum(e.event == "started" and e.restart > 0 for e in self.events())
