"""The interface between a run's driver and the place of its processes: this machine, or a Slurm allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar


class NamedPlan(Protocol):
    """How to start one process, or one group of processes that end together; each launcher has its own kind."""

    @property
    def name(self) -> str: ...


class Process(Protocol):
    """A started process."""

    name: str
    log: Path

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""


PlanT = TypeVar("PlanT", bound=NamedPlan)
ProcessT = TypeVar("ProcessT", bound=Process)


class Launcher(Protocol[PlanT, ProcessT]):
    def start(self, plan: PlanT) -> ProcessT:
        """Start it and return at once. Its output is appended to its log."""

    def end(self, processes: Sequence[ProcessT], grace_s: float) -> None:
        """Ask all of them to stop, wait up to `grace_s`, and kill the ones that still run. Some may have ended."""


@dataclass(frozen=True, slots=True)
class RunPlan(Generic[PlanT]):
    """Every process of a run."""

    engines: Sequence[PlanT]
    orchestrator: PlanT | None  # None where no rollouts are sampled
    trainers: Sequence[PlanT]  # every rank, one by one or in groups
