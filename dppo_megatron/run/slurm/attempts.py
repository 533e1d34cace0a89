"""Records in restarts.jsonl how each attempt of a run's jobs starts and ends, and whether the job restarts."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import StringConstraints

from dppo_megatron.common.files import append_json_line
from dppo_megatron.report.tail import read_records, records_as
from dppo_megatron.run_dir import RunDir

TIME_LIMIT = "time limit"
LOST = "ended by Slurm: a node failed, or the job was preempted or requeued by hand"

Event = Literal["submitted", "started", "requeued", "failed", "stopped", "completed"]


@dataclass(frozen=True, slots=True)
class AttemptEvent:
    time: float  # unix seconds
    job: Annotated[str, StringConstraints(pattern=r"^\d+(_\d+)?$")]  # JOB_TASK for an array
    restart: int  # how often Slurm has restarted this job
    event: Event
    cause: str  # why the attempt began or ended
    step: int | None  # newest checkpoint step; None before the first checkpoint
    nodes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  # nodes that the job's later attempts avoid


class AttemptLog:
    """Appends to restarts.jsonl and reads it. Only the job's driver or the submitting command writes at a time."""

    def __init__(self, run: RunDir):
        self._run = run

    def record(self, event: Event, cause: str, *, job: str, restart: int, **nodes: tuple[str, ...]) -> None:
        """Append an event. `nodes` contains the event fields `nodes` and `excluded`."""
        self._run.make()
        entry = AttemptEvent(time.time(), job, restart, event, cause, self._run.checkpoint_step, **nodes)
        append_json_line(self._run.restarts, asdict(entry))

    def events(self) -> list[AttemptEvent]:
        return records_as(AttemptEvent, read_records(self._run.restarts))

    def why_restarted(self) -> str:
        """Return the cause that the previous attempt recorded, or `LOST` if it could not record a cause."""
        events = self.events()
        return events[-1].cause if events and events[-1].event == "requeued" else LOST

    def without_progress(self) -> int:
        """Return how many attempts in a row, including this one, began at the newest checkpoint.

        None of these attempts saved another checkpoint, for any cause. Submitting the run again restarts the count.
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
        """Return the nodes that the newest job avoids because earlier attempts excluded them."""
        events = self.events()
        return sorted({node for event in events if event.job == events[-1].job for node in event.excluded})

    def restarts(self) -> int:
        """Return how many attempts followed an earlier attempt in the same job."""
        return sum(e.event == "started" and e.restart > 0 for e in self.events())
