"""The interface between a run's driver and the environment of its processes: this machine, or a Slurm allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar


class NamedPlan(Protocol):
    """A plan to start one process, or a group of processes that end together. Each launcher has its own kind."""

    @property
    def name(self) -> str: ...


class Process(Protocol):
    """A started process."""

    name: str
    log: Path

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""


PlanT = TypeVar("PlanT", bound=NamedPlan)
ProcessT = TypeVar("ProcessT", bound=Process)


class Launcher(Protocol[PlanT, ProcessT]):
    def start(self, plan: PlanT) -> ProcessT:
        """Start the process and return at once. Its output is appended to its log."""

    def end(self, processes: Sequence[ProcessT], grace_s: float) -> None:
        """Ask all processes to stop, wait up to `grace_s`, and kill the remaining ones. Some may have ended."""


@dataclass(frozen=True, slots=True)
class RunPlan(Generic[PlanT]):
    """The plans of every process of a run."""

    engines: Sequence[PlanT]
    orchestrator: PlanT | None  # None if no rollouts are sampled
    trainers: Sequence[PlanT]  # all ranks, one by one or in groups
