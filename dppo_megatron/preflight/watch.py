"""Reads what the processes of a preflight report, waits as long as any goes on, and concludes."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.common.files import write_json
from dppo_megatron.common.process import exit_reason
from dppo_megatron.config import Config
from dppo_megatron.launch.launcher import Process
from dppo_megatron.observability.logs import append_line
from dppo_megatron.run_dir import RunDir

from .findings import Finding, Reported, Tasks, findings
from .groups import WEIGHTS, process_groups
from .node import TOKEN
from .task import DONE, KEEPER, MARK, STARTED, silence_timeout_s

POLL_S = 0.1
AFTER_FAILURE_S = 3.0  # of silence, where a process has reported one
# srun's words for a task that a signal or its own error ended, and for one that did not start.
_ENDED = re.compile(r"error: (?:(\S+): tasks? [\d,-]+: (.+)|Task launch for .* failed on node (\S+): (.+))")


@dataclass(frozen=True, slots=True)
class Preflight:
    """The conclusion."""

    nodes: dict[str, dict[str, Any]]
    findings: list[Finding]
    seconds: float

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def bad_nodes(self) -> tuple[str, ...]:
        return tuple(sorted({node for finding in self.errors for node in finding.nodes}))

    def as_dict(self) -> dict[str, Any]:
        return {"time": time.time(), "ok": not self.errors, "bad_nodes": self.bad_nodes, **asdict(self)}

    def text(self) -> str:
        rows = [f"{'node':<20} {'processes':>9} {'clock':>8} {'errors':>6}  driver, GPU"]
        for node, facts in self.nodes.items():
            errors, gpu = sum(node in finding.nodes for finding in self.errors), f"{facts['driver']}, {facts['GPU']}"
            rows.append(f"{node:<20} {facts['processes']:>9} {facts['clock']:>+6.1f} s {errors:>6}  {gpu}")
        return "\n".join([*rows, *map(str, self.findings), f"preflight: {len(self.errors)} errors, {self.seconds:g} s"])


def run_preflight(
    config: Config,
    places: Mapping[str, str],
    start: Callable[[str], Sequence[Process]],
    stopped: Callable[[], bool] = lambda: False,
) -> Preflight | None:
    """The conclusion, also in RUN/preflight.json and the log; None once `stopped`.

    places: names of the processes and their nodes. start: starts all of them with their output in the run's log
    `preflight`, given the name of a file that they are to see in the run directory; ending them is left to the caller.
    """
    run = RunDir(config.run.dir)
    log, name = run.log("preflight"), secrets.token_hex(4)
    append_line(log, f"preflight {name}")
    token, offset = run.root / f"{TOKEN}{name}", log.stat().st_size
    tasks = {task: Reported(node) for task, node in places.items()}
    token.touch()
    try:
        found = _watch(config, tasks, log, offset, start(name), stopped)
    finally:
        token.unlink()
    if found is not None:
        write_json(run.root / "preflight.json", found.as_dict(), indent=1)
        append_line(log, found.text())
    return found


def _watch(
    config: Config, tasks: Tasks, log: Path, offset: int, processes: Sequence[Process], stopped: Callable[[], bool]
) -> Preflight | None:
    """Returns when all are done or have ended, or when those that remain are silent for too long."""
    ended: dict[str, str] = {}
    began = heard = time.monotonic()
    timeout, half_s = silence_timeout_s(len(tasks)), None  # when half of them had imported torch
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
            with contextlib.suppress(ValueError, KeyError):  # another program's output
                facts = json.loads(line.partition(MARK)[2])
                if "clock" in facts:
                    facts["skew_s"] = facts["clock"] - time.time()
                tasks[facts["task"]].add(facts)
                heard = time.monotonic()
        now = time.monotonic()
        alive = [task for task in tasks.values() if not task.failed and task.node not in ended]
        early = [task for task in alive if task.stage in (None, STARTED)]
        if half_s is None and 2 * len(early) <= len(alive):
            half_s = now - began
        # Torch may come from a slow disk, but for all alike: the later half gets as long again.
        early_s = config.slurm.start_timeout_s if half_s is None else half_s + max(timeout, half_s)
        late = not early or now - began > early_s
        silence = AFTER_FAILURE_S if ended or any(task.failed for task in tasks.values()) else timeout
        if not running or all(task.stage == DONE for task in tasks.values()) or (late and now - heard > silence):
            codes = {process.name: process.poll() for process in processes}
            ended |= {tasks[name].node: exit_reason(code) for name, code in codes.items() if code and name in tasks}
            return Preflight(_nodes(tasks), findings(tasks, _groups(config, tasks), ended), round(now - began, 1))
    return None


def _groups(config: Config, tasks: Tasks) -> dict[str, list[str]]:
    ranks = {name: task.node for name, task in tasks.items() if name.startswith("rank")}
    groups = process_groups(config.parallel, len(ranks) // len(set(ranks.values())))
    named = {group: [f"rank-{rank}" for rank in members] for group, members in groups.items()}
    return named | {WEIGHTS: [KEEPER, *(name for name in tasks if name not in ranks)]}


def _nodes(tasks: Tasks) -> dict[str, dict[str, Any]]:
    """What the report shows of each."""
    shown: dict[str, dict[str, Any]] = {}
    for task in tasks.values():
        facts = shown.setdefault(task.node, {"processes": 0, "driver": "-", "GPU": "-"})
        same = {what: value for what, value in task.facts.get("same", {}).items() if what in facts}
        facts |= {**same, "processes": facts["processes"] + 1, "clock": round(task.facts.get("skew_s", 0.0), 1)}
    return shown
