"""Times named step parts, marks them for profilers, and writes traces of chosen steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import profile, record_function

from dppo_megatron.common.heartbeat import in_phase
from dppo_megatron.config.schema import ProfileConfig

log = logging.getLogger(__name__)

EVENTS = 200_000  # allocator events in a memory snapshot


@dataclass
class Phase:
    seconds: float = 0.0


@contextmanager
def phase(name: str) -> Iterator[Phase]:
    """Time a step part and set `seconds` when it ends. Marks a range in torch's profiler and, on CUDA, in NVTX."""
    part, started = Phase(), time.perf_counter()
    with (
        in_phase(name),
        record_function(name),
        torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else nullcontext(),
    ):
        yield part
    part.seconds = time.perf_counter() - started


class StepProfiler:
    """Writes Chrome traces, `directory`/step_N_rank_R.json.gz, for chosen steps on chosen ranks."""

    def __init__(self, settings: ProfileConfig, directory: Path, rank: int):
        self._steps = settings.steps if rank in settings.ranks else ()
        self._memory = settings.memory and torch.cuda.is_available()
        self._directory, self._rank = directory, rank
        self._running: tuple[int, profile] | None = None
        if self._steps and settings.memory and not self._memory:
            log.warning("profile.memory = true: there is no CUDA device, so no memory snapshot is written")

    def begin(self, step: int) -> None:
        """Start the trace if `step` was chosen. Steps count from 1, as in the metrics."""
        if step in self._steps:
            if self._memory:
                torch.cuda.memory._record_memory_history(max_entries=EVENTS)
            self._running = step, profile()
            self._running[1].start()

    def end(self) -> None:
        """Write the trace since `begin`, if it started one. A failed write does not stop the run."""
        if self._running is None:
            return
        (step, trace), self._running = self._running, None
        trace.stop()
        path = self._directory / f"step_{step}_rank_{self._rank}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(f"{path}.json.gz")
            if self._memory:
                torch.cuda.memory._dump_snapshot(f"{path}.pickle")
        except (OSError, RuntimeError) as error:
            log.warning("%s: no trace is written: %s", path, error)
        if self._memory:
            torch.cuda.memory._record_memory_history(enabled=None)
