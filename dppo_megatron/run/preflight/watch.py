"""Reads the reports of preflight processes while they make progress, and derives the result."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.common.files import write_json
from dppo_megatron.common.process import exit_reason
from dppo_megatron.config import Config
from dppo_megatron.report.logs import append_line
from dppo_megatron.run.launch.launcher import Launcher, PlanT, Process, ProcessT
from dppo_megatron.run_dir import RunDir

from .findings import NodeFinding, Reported, Tasks, findings
from .groups import checked_groups
from .node import TOKEN
from .task import DONE, MARK, STARTED, STARTING, silence_timeout_s

POLL_S = 0.1
AFTER_FAILURE_S = 3.0  # seconds of silence after a process has reported a failure
# srun writes these messages about a task that a signal or an error ended, or that did not start.
_ENDED = re.compile(r"error: (?:(\S+): tasks? [\d,-]+: (.+)|Task launch for .* failed on node (\S+): (.+))")


@dataclass(frozen=True, slots=True)
class Preflight:
    """Contains a preflight's result."""

    nodes: dict[str, dict[str, str]]  # node -> values that are compared between nodes
    findings: list[NodeFinding]
    seconds: float

    @property
    def errors(self) -> list[NodeFinding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def bad_nodes(self) -> tuple[str, ...]:
        return tuple(sorted({node for finding in self.errors for node in finding.nodes}))

    def as_dict(self) -> dict[str, Any]:
        return {"time": time.time(), "ok": not self.errors, "bad_nodes": self.bad_nodes, **asdict(self)}

    def text(self) -> str:
        end = f"preflight: {len(self.nodes)} nodes, {len(self.errors)} errors, {self.seconds:g} s"
        return "\n".join([*map(str, self.findings), end])


def run_preflight(
    config: Config,
    places: Mapping[str, str],
    launcher: Launcher[PlanT, ProcessT],
    plans: Sequence[PlanT],
    token: str,
    stopped: Callable[[], bool] = lambda: False,
) -> Preflight | None:
    """Run the checks; return the result, and write it to RUN/preflight.json and the log. None once `stopped`.

    - places: process name -> node
    - plans: start all processes, with output in the run's log `preflight`
    - token: part of the name of a file that processes look for in the run directory
    """
    run = RunDir(config.run.dir)
    log, file, started = run.log("preflight"), run.root / f"{TOKEN}{token}", list[ProcessT]()
    append_line(log, f"preflight {token}")
    offset = log.stat().st_size
    file.touch()
    try:
        started.extend(map(launcher.start, plans))
        report = _watch(config, {task: Reported(node) for task, node in places.items()}, log, offset, started, stopped)
    finally:
        launcher.end(started, 0.0)
        file.unlink()
    if report is not None:
        write_json(run.root / "preflight.json", report.as_dict(), indent=1)
        append_line(log, report.text())
    return report


def _watch(
    config: Config, tasks: Tasks, log: Path, offset: int, processes: Sequence[Process], stopped: Callable[[], bool]
) -> Preflight | None:
    """Return when all processes are done or have ended, or when the remaining processes are silent for too long."""
    ended: dict[str, str] = {}
    began = heard = time.monotonic()
    timeout, half_s = silence_timeout_s(len(tasks)), None  # when half of the processes had imported torch
    while not stopped():
        time.sleep(POLL_S)
        running = any(process.poll() is None for process in processes)
        with log.open("rb") as file:
            file.seek(offset)
            whole = file.read().rpartition(b"\n")[0]
        offset += len(whole) + bool(whole)
        for line in whole.decode("utf-8", "replace").splitlines():
            if match := _ENDED.search(line):
                ended[match[1] or match[3]] = match[2] or match[4]
            with contextlib.suppress(ValueError, KeyError):  # output of another program
                facts = json.loads(line.partition(MARK)[2])
                if "clock" in facts:
                    facts["skew_s"] = facts["clock"] - time.time()
                tasks[facts["task"]].add(facts)
                heard = time.monotonic()
        now = time.monotonic()
        alive = [task for task in tasks.values() if not task.failed and task.node not in ended]
        early = [task for task in alive if task.stage in (STARTING, STARTED)]
        if half_s is None and 2 * len(early) <= len(alive):
            half_s = now - began
        # A slow disk delays torch for all processes, so the later half gets as much time again.
        early_s = config.slurm.start_timeout_s if half_s is None else half_s + max(timeout, half_s)
        late = not early or now - began > early_s
        silence = AFTER_FAILURE_S if ended or any(task.failed for task in tasks.values()) else timeout
        if not running or all(task.stage == DONE for task in tasks.values()) or (late and now - heard > silence):
            ranks = [task.node for name, task in tasks.items() if name.startswith("rank")]
            groups = checked_groups(config, len(ranks) // len(set(ranks)), len(tasks))
            nodes: dict[str, dict[str, str]] = {}
            for task in tasks.values():
                nodes.setdefault(task.node, {}).update(task.facts.get("same", {}))
            if len(nodes) == 1 and not ended:  # without srun, only exit codes show ended processes
                ended = {node: exit_reason(code) for node in nodes for process in processes if (code := process.poll())}
            return Preflight(nodes, findings(tasks, groups, ended), round(now - began, 1))
    return None
