"""Defines how a run's driver starts processes, on this machine or in a Slurm allocation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar


class Plan(Protocol):
    """Describes how to start a process, or several that end together. Each launcher defines a kind of plan."""

    @property
    def home(self) -> Path | None:
        """Return the directory in which a teacher's server registers as engine-0; None for all other processes."""


class Process(Protocol):
    """Represents a started process."""

    name: str
    log: Path

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""


PlanT = TypeVar("PlanT", bound=Plan)
ProcessT = TypeVar("ProcessT", bound=Process)


class Launcher(ABC, Generic[PlanT, ProcessT]):
    @abstractmethod
    def start(self, plan: PlanT) -> ProcessT:
        """Start the process and return at once. The output is appended to the process log."""

    @abstractmethod
    def end(self, processes: Sequence[ProcessT], grace_s: float) -> None:
        """Ask all processes to stop, wait up to `grace_s`, and kill the rest. Some may have ended before the call."""


@dataclass(frozen=True, slots=True)
class RunPlan(Generic[PlanT]):
    """Contains the plans for all processes in a run."""

    engines: Sequence[PlanT]
    orchestrator: PlanT | None  # None if the run samples no rollouts
    trainers: Sequence[PlanT]  # all ranks, singly or in groups
