"""What is wrong, and with which nodes: pure functions of what the processes reported."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .task import IMPORTED, KEEPER, LOOKED, STAGES, STARTED

MOST_SKEW_S = 5.0
_NEXT = {
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
            self.stage = facts.get("stage", self.stage)

    @property
    def failed(self) -> bool:
        return any("error" in facts for facts in (self.facts, *self.groups.values()))

    @property
    def met(self) -> bool:
        return self.stage in STAGES[3:]


def findings(
    tasks: Mapping[str, Reported], groups: Mapping[str, Sequence[str]], ended: Mapping[str, str], *, done: bool
) -> list[Finding]:
    """groups: names of the members of each, in the order of the checks. ended: node -> how a process there ended."""
    gpus = {name: (task.node, task.facts["gpu"]) for name, task in tasks.items() if task.facts.get("gpu")}
    out = [*_of_nodes(tasks), *shared_gpus(gpus), *_different(tasks)]
    if ended:
        return out + [Finding(f"a process there ended: {how}", (node,)) for node, how in ended.items()]
    return out + (([] if done else _behind(tasks)) or _of_groups(tasks, groups))


def _of_nodes(tasks: Mapping[str, Reported]) -> list[Finding]:
    nodes: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)  # an ordered set of each
    for task in tasks.values():
        for kind in ("problems", "faults", "warnings"):
            for text in task.facts.get(kind, ()):
                nodes[kind, text][task.node] = None
        if abs(skew := task.facts.get("skew_s", 0.0)) > MOST_SKEW_S:
            nodes["warnings", f"its clock is {skew:+.0f} s from the driver's: times in logs mislead"][task.node] = None
    every = {task.node for task in tasks.values()}
    return [
        Finding(text, tuple(at), "warning" if kind == "warnings" else "error", kind == "problems" and set(at) == every)
        for (kind, text), at in nodes.items()
    ]


def shared_gpus(gpus: Mapping[str, tuple[str, str]]) -> list[Finding]:
    """Trainer ranks of a node that use one GPU. gpus: {"rank-0": ("node1", "GPU-8f"), "rank-1": ("node1", "GPU-8f")}"""
    users: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, place in gpus.items():
        users[place] += [name] if name.startswith("rank") else []
    return [
        Finding(f"{' and '.join(names)} share GPU {uuid}; see --gpu-bind in slurm.srun_args", (node,))
        for (node, uuid), names in users.items()
        if len(names) > 1
    ]


def _different(tasks: Mapping[str, Reported]) -> list[Finding]:
    """What is not on a node as on most; of as many, the highest counts."""
    values: dict[str, dict[str, str]] = defaultdict(dict)
    for task in tasks.values():
        for what, value in task.facts.get("same", {}).items():
            values[what][task.node] = value
    out = []
    for what, by_node in values.items():
        counts = Counter(by_node.values())
        common = max(counts, key=lambda value: (counts[value], value))
        for value in counts.keys() - {common}:
            nodes = tuple(node for node, found in by_node.items() if found == value)
            out.append(Finding(f"{what}: {value}, on other nodes {common}", nodes))
    return out


def _behind(tasks: Mapping[str, Reported]) -> list[Finding]:
    """Of processes that are not all done: those that failed, or never came to the groups. First causes only."""
    behind = {name: task for name, task in tasks.items() if not task.met or "error" in task.facts}
    if first := {name: task for name, task in behind.items() if task.stage != LOOKED or name == KEEPER}:
        behind = first
    home = tasks[KEEPER].node
    away = {task.node for task in tasks.values()} - {home}
    if len(away) > 1 and away == {task.node for task in behind.values()} and not first:
        return [Finding("the store of rank 0 there is reached from no other node", (home,))]
    return [
        Finding(f"{name}: {task.facts.get('error') or _NEXT[task.stage]}", (task.node,))
        for name, task in behind.items()
    ]


def _of_groups(tasks: Mapping[str, Reported], groups: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Of processes that all met: groups that came to a wrong result or to none."""
    out: list[Finding] = []
    passed: set[str] = set()  # nodes of groups that worked between nodes
    broken = []
    for group, members in groups.items():
        nodes = {tasks[name].node for name in members}
        seen = [tasks[name].groups.get(group) for name in members]
        if wrong := sorted({members[row] for facts in seen if facts for row in facts.get("wrong", ())}):
            at = tuple(sorted({tasks[name].node for name in wrong}))
            out.append(Finding(f"group {group}: the values of {_listed(wrong)} arrived wrong", at))
        if all(facts and "wrong" in facts for facts in seen):
            passed |= nodes if len(nodes) > 1 else set()
        elif any(seen):
            broken.append((group, members, seen, nodes))
    for group, members, seen, nodes in broken:
        absent = [name for name, facts in zip(members, seen, strict=True) if facts is None]
        at_fault = {tasks[name].node for name in absent} or nodes - passed
        errors = [facts["error"] for facts in seen if facts and "error" in facts]
        why = f"{', '.join(absent)} did not arrive" if absent else "all arrived, and it did not end"
        text = (
            f"group {group} ({_listed(members)} on {_listed(sorted(nodes))}): {why}{f'; {errors[0]}' if errors else ''}"
        )
        blamed = () if at_fault == {task.node for task in tasks.values()} else tuple(sorted(at_fault))
        out.append(Finding(text, blamed))
    return out


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
