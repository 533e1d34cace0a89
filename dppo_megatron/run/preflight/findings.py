"""Finds problems and faulty nodes in the processes' reports, by pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dppo_megatron.errors import bounded

from .groups import KEEPER, PAIRS
from .task import DONE, LOOKED, READY, STARTING

MAX_SKEW_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeFinding:
    text: str
    nodes: tuple[str, ...]  # faulty nodes; empty if unknown
    level: str = "error"  # or "warning"
    everywhere: bool = False  # other nodes would not help

    def __str__(self) -> str:
        return f"{self.level}: {', '.join(self.nodes) or 'some node'}: {self.text}"


@dataclass(slots=True)
class Reported:
    """Collects the lines that a process has reported so far."""

    node: str
    stage: str = STARTING
    facts: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)  # joined groups; `wrong` or `error` after leaving

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


def findings(tasks: Tasks, groups: Mapping[str, Sequence[str]], ended: Mapping[str, str]) -> list[NodeFinding]:
    """Return the findings of all processes.

    groups: member names of each group, in the order of checks. ended: node -> how a process there ended.
    """
    ends = [NodeFinding(f"a process there ended: {reason}", (node,)) for node, reason in ended.items()]
    return [*_node_findings(tasks), *(ends or _late_findings(tasks) or _group_findings(tasks, groups))]


def _node_findings(tasks: Tasks) -> Iterator[NodeFinding]:
    """Yield problems of single nodes: reported problems, shared GPUs, and values that differ from most other nodes."""
    nodes: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)  # an ordered set of nodes for each text
    users: dict[tuple[str, str], list[str]] = defaultdict(list)  # ranks of each GPU
    same: dict[str, dict[str, str]] = defaultdict(dict)
    for name, task in tasks.items():
        for kind in ("problems", "faults", "warnings"):
            for text in task.facts.get(kind, ()):
                nodes[kind, text][task.node] = None
        if abs(skew := task.facts.get("skew_s", 0.0)) > MAX_SKEW_S:
            nodes["warnings", f"its clock is {skew:+.0f} s from the driver's: times in logs mislead"][task.node] = None
        for fact, value in task.facts.get("same", {}).items():
            same[fact][task.node] = value
        if name.startswith("rank") and (gpu := task.facts.get("gpu")):
            users[task.node, gpu].append(name)
    every = {task.node for task in tasks.values()}
    for (kind, text), at in nodes.items():
        everywhere = at.keys() == every and (len(every) > 1 or kind == "problems")
        yield NodeFinding(text, tuple(at), "warning" if kind == "warnings" else "error", everywhere)
    for (node, gpu), names in users.items():
        if len(names) > 1:
            text = f"{' and '.join(names)} share GPU {gpu}; see --gpu-bind in slurm.srun_args"
            yield NodeFinding(text, (node,))
    for fact, values in same.items():
        counts = Counter(values.values())
        common = max(counts, key=lambda value: (counts[value], value))  # the highest of the most frequent values
        odd = [node for node, value in values.items() if value != common]
        yield from (NodeFinding(f"{fact}: {values[node]}, on other nodes {common}", (node,)) for node in odd)


def _late_findings(tasks: Tasks) -> list[NodeFinding]:
    """Return processes that failed or never reached the groups.

    Processes that wait for rank 0's store are left out if rank 0 or a process at an earlier stage is late.
    """
    late_tasks = {
        name: task for name, task in tasks.items() if task.stage not in (READY, DONE) or "error" in task.facts
    }
    if causes := {name: task for name, task in late_tasks.items() if task.stage != LOOKED or name == KEEPER}:
        late_tasks = causes
    home, other_nodes = tasks[KEEPER].node, {task.node for task in tasks.values()} - {tasks[KEEPER].node}
    if len(other_nodes) > 1 and not causes and other_nodes == {task.node for task in late_tasks.values()}:
        return [NodeFinding("the store of rank 0 there is reached from no other node", (home,))]
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, task in late_tasks.items():
        reasons[task.node, task.facts.get("error") or f"no answer while {task.stage}"].append(name)
    return [NodeFinding(f"{', '.join(names)}: {reason}", (node,)) for (node, reason), names in reasons.items()]


def _group_findings(tasks: Tasks, groups: Mapping[str, Sequence[str]]) -> Iterator[NodeFinding]:
    """Yield the groups that ended with a wrong result or without a result, if all processes have met."""
    worked: set[str] = set()  # nodes of groups that worked between nodes
    failures = {}
    for group, members in groups.items():
        nodes = {tasks[name].node for name in members}
        outcomes = {name: tasks[name].groups.get(group, {}) for name in members}
        if wrong := sorted({members[row] for facts in outcomes.values() for row in facts.get("wrong", ())}):
            at = tuple(sorted({tasks[name].node for name in wrong}))
            yield NodeFinding(f"group {group}: the values of {', '.join(wrong)} arrived wrong", at)
        if all("wrong" in facts for facts in outcomes.values()):
            worked |= nodes if len(nodes) > 1 else set()
        elif any(outcomes.values()):
            failures[group] = nodes, outcomes
    stuck: set[str] = set()  # these members reach no later group, which is not that group's fault
    for group, (nodes, outcomes) in failures.items():
        if PAIRS in group or not stuck & outcomes.keys():
            absent = [name for name, facts in outcomes.items() if not facts]
            at_fault = {tasks[name].node for name in absent} or (nodes - worked if len(nodes) > 1 else nodes)
            reason = f"{', '.join(absent)} did not arrive" if absent else "all arrived, and it did not end"
            reason += "".join([f"; {facts['error']}" for facts in outcomes.values() if "error" in facts][:1])
            has_culprit = at_fault != {task.node for task in tasks.values()}
            who = bounded(f"{', '.join(outcomes)} on {', '.join(sorted(nodes))}", 200)
            text = bounded(f"group {group} ({who}): {reason}", 1000)
            yield NodeFinding(text, tuple(sorted(at_fault)) if has_culprit else ())
        stuck |= outcomes.keys()
