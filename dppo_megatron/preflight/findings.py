"""What is wrong, and with which nodes: pure functions of what the processes reported."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dppo_megatron.errors import bounded

from .groups import PAIRS
from .task import DONE, IMPORTED, KEEPER, LOOKED, READY, STARTED

MOST_SKEW_S = 5.0
_DID_NOT = {
    None: "did not start", STARTED: "no answer while it imported torch", LOOKED: "no answer from the store of rank 0",
    IMPORTED: "no answer while it looked at GPUs, the model, the data and run.dir",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    text: str
    nodes: tuple[str, ...]  # at fault; none where that is unknown
    level: str = "error"  # or warning
    everywhere: bool = False  # other nodes would not help

    def __str__(self) -> str:
        return f"{self.level}: {', '.join(self.nodes) or 'some node'}: {self.text}"


@dataclass(slots=True)
class Reported:
    """The lines of one process so far."""

    node: str
    stage: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)  # joined; on leaving with `wrong` or `error`

    def add(self, facts: dict[str, Any]) -> None:
        if group := facts.get("joins") or facts.get("left"):
            self.groups[group] = facts
        else:
            self.facts |= facts
            self.node, self.stage = facts["node"], facts.get("stage", self.stage)

    @property
    def failed(self) -> bool:
        return any("error" in facts for facts in (self.facts, *self.groups.values()))


Tasks = Mapping[str, Reported]


def findings(tasks: Tasks, groups: Mapping[str, Sequence[str]], ended: Mapping[str, str]) -> list[Finding]:
    """groups: names of the members of each, in the order of the checks. ended: node -> how a process there ended."""
    nodes: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)  # an ordered set of nodes for each text
    same: dict[str, dict[str, str]] = defaultdict(dict)
    for task in tasks.values():
        for kind in ("problems", "faults", "warnings"):
            for text in task.facts.get(kind, ()):
                nodes[kind, text][task.node] = None
        if abs(skew := task.facts.get("skew_s", 0.0)) > MOST_SKEW_S:
            nodes["warnings", f"its clock is {skew:+.0f} s from the driver's: times in logs mislead"][task.node] = None
        for what, value in task.facts.get("same", {}).items():
            same[what][task.node] = value
    every = {task.node for task in tasks.values()}
    out = []
    for (kind, text), at in nodes.items():
        everywhere = at.keys() == every and (len(every) > 1 or kind == "problems")
        out.append(Finding(text, tuple(at), "warning" if kind == "warnings" else "error", everywhere))
    out += shared_gpus({n: (t.node, t.facts["gpu"]) for n, t in tasks.items() if n[0] == "r" and t.facts.get("gpu")})
    for what, values in same.items():
        common, odd = odd_ones(values)
        out += [Finding(f"{what}: {values[node]}, on other nodes {common}", (node,)) for node in odd]
    if ended:
        return out + [Finding(f"a process there ended: {how}", (node,)) for node, how in ended.items()]
    return out + (_behind(tasks) or _of_groups(tasks, groups))


def shared_gpus(gpus: Mapping[str, tuple[str, str]]) -> list[Finding]:
    """Ranks of a node that use one GPU. gpus: {"rank-0": ("node1", "GPU-8f"), "rank-1": ("node1", "GPU-8f")}"""
    users: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, place in gpus.items():
        users[place].append(name)
    return [
        Finding(f"{' and '.join(names)} share GPU {uuid}; see --gpu-bind in slurm.srun_args", (node,))
        for (node, uuid), names in users.items()
        if len(names) > 1
    ]


def odd_ones(values: Mapping[str, str]) -> tuple[str, list[str]]:
    """The most common value, of as many the highest, and the nodes that have another."""
    counts = Counter(values.values())
    common = max(counts, key=lambda value: (counts[value], value))
    return common, [node for node, value in values.items() if value != common]


def _behind(tasks: Tasks) -> list[Finding]:
    """Processes that failed, or never came to the groups. First causes only: all need the store of rank 0."""
    behind = {name: task for name, task in tasks.items() if task.stage not in (READY, DONE) or "error" in task.facts}
    if causes := {name: task for name, task in behind.items() if task.stage != LOOKED or name == KEEPER}:
        behind = causes
    home, away = tasks[KEEPER].node, {task.node for task in tasks.values()} - {tasks[KEEPER].node}
    if len(away) > 1 and not causes and away == {task.node for task in behind.values()}:
        return [Finding("the store of rank 0 there is reached from no other node", (home,))]
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, task in behind.items():
        reasons[task.node, task.facts.get("error") or _DID_NOT[task.stage]].append(name)
    return [Finding(f"{', '.join(names)}: {why}", (node,)) for (node, why), names in reasons.items()]


def _of_groups(tasks: Tasks, groups: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Of processes that all met: groups that came to a wrong result or to none."""
    out: list[Finding] = []
    passed: set[str] = set()  # nodes of groups that worked between nodes
    broken = {}
    for group, members in groups.items():
        nodes = {tasks[name].node for name in members}
        seen = {name: tasks[name].groups.get(group, {}) for name in members}
        if wrong := sorted({members[row] for facts in seen.values() for row in facts.get("wrong", ())}):
            at = tuple(sorted({tasks[name].node for name in wrong}))
            out.append(Finding(f"group {group}: the values of {', '.join(wrong)} arrived wrong", at))
        if all("wrong" in facts for facts in seen.values()):
            passed |= nodes if len(nodes) > 1 else set()
        elif any(seen.values()):
            broken[group] = nodes, seen
    stuck: set[str] = set()  # these come to no later group, which is not that one's fault
    for group, (nodes, seen) in broken.items():
        if PAIRS in group or not stuck & seen.keys():
            absent = [name for name, facts in seen.items() if not facts]
            at_fault = {tasks[name].node for name in absent} or (nodes - passed if len(nodes) > 1 else nodes)
            why = f"{', '.join(absent)} did not arrive" if absent else "all arrived, and it did not end"
            why += "".join([f"; {facts['error']}" for facts in seen.values() if "error" in facts][:1])
            known = at_fault != {task.node for task in tasks.values()}
            who = bounded(f"{', '.join(seen)} on {', '.join(sorted(nodes))}", 200)
            text = bounded(f"group {group} ({who}): {why}", 1000)
            out.append(Finding(text, tuple(sorted(at_fault)) if known else ()))
        stuck |= seen.keys()
    return out
