"""Counts what a bank holds, and finds sampled tokens that would be trained on twice, not at all, or otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dppo_megatron.types import ENVIRONMENT, INHERITED, POLICY, Rollout, RolloutGroup

TOKENS = {POLICY: "policy tokens", ENVIRONMENT: "environment tokens", INHERITED: "inherited tokens"}
Turn = tuple[int, int, int]  # prompt position, trajectory, turn
OF_TOKENS = ("token_ids", "rollout_logprob", "versions", "topk_ids", "rollout_topk_logprob", "kept_ids", "kept_counts")


@dataclass
class Audit:
    """counts: of groups, trajectories, branches, turns and tokens by origin. problems: one line each."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        found = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"{found}; {len(self.problems)} problems"


def audit(groups: Iterable[RolloutGroup], sampled: Mapping[Turn, Rollout] | None = None) -> Audit:
    """Checks that each turn stands in one policy span of its trajectory, and is inherited as it was sampled.

    sampled: every turn as the engine returned it, where somebody kept that: then ids, log-probs, versions, lists and
    kept sets are compared bit for bit, and no turn may be missing.
    """
    result = Audit()
    found: dict[Turn, Rollout] = {}
    for group in groups:
        result.counts["groups"] += 1
        result.counts["trajectories"] += len({_trajectory(group, i) for i in range(len(group.rollouts))})
        _audit_group(group, result, found)
    if sampled is not None:
        result.problems += [f"{_name(turn)}: sampled, but in no policy span" for turn in sampled if turn not in found]
        for turn, rollout in found.items():
            if turn not in sampled:
                result.problems.append(f"{_name(turn)}: a policy span that nobody sampled")
            elif differing := [name for name in OF_TOKENS if not _same(rollout, sampled[turn], name)]:
                result.problems.append(f"{_name(turn)}: {', '.join(differing)} differ from what was sampled")
    return result


def _audit_group(group: RolloutGroup, result: Audit, found: dict[Turn, Rollout]) -> None:
    behind: dict[Turn, np.ndarray] = {}  # all tokens up to the end of the turn
    for i, rollout in enumerate(group.rollouts):
        result.counts["branches"] += 1
        whole = np.concatenate([group.prompt.token_ids, rollout.token_ids])
        begin, own = len(group.prompt.token_ids), 0
        for origin, tokens, number in _spans(rollout):
            turn = (group.prompt.position, _trajectory(group, i), number)
            begin += tokens
            result.counts[TOKENS[origin]] += tokens
            if origin == POLICY:
                result.counts["turns"] += 1
                if turn in found:
                    result.problems.append(f"{_name(turn)}: in two policy spans")
                found[turn] = _part(rollout, whole[begin - tokens : begin], own, own + tokens)
                own += tokens
                behind[turn] = whole[:begin]
            elif origin == INHERITED and not np.array_equal(behind.get(turn, ()), whole[:begin]):
                result.problems.append(f"{_name(turn)}: inherited otherwise than an earlier branch has it")
    for position, trajectory, number in behind:
        before = (position, trajectory, number - 1)
        if number and before not in behind:
            result.problems.append(f"{_name(before)}: in no policy span")


def _part(rollout: Rollout, token_ids: np.ndarray, begin: int, end: int) -> Rollout:
    """Sampled tokens begin to end of a branch, as one turn."""
    kept_ids = None
    if rollout.kept_counts is not None and rollout.kept_ids is not None:
        ends = np.concatenate([[0], np.cumsum(rollout.kept_counts)])
        kept_ids = rollout.kept_ids[ends[begin] : ends[end]]

    def rows(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else array[begin:end]

    return Rollout(
        token_ids=token_ids,
        rollout_logprob=rollout.rollout_logprob[begin:end],
        versions=rollout.versions[begin:end],
        finish_reason=rollout.finish_reason,
        topk_ids=rows(rollout.topk_ids),
        rollout_topk_logprob=rows(rollout.rollout_topk_logprob),
        kept_ids=kept_ids,
        kept_counts=rows(rollout.kept_counts),
    )


def _same(a: Rollout, b: Rollout, name: str) -> bool:
    one, two = getattr(a, name), getattr(b, name)
    return one is two is None or (one is not None and two is not None and np.array_equal(one, two))


def _spans(rollout: Rollout) -> list[list[int]]:
    if rollout.spans is not None:
        return rollout.spans.tolist()
    return [[POLICY, len(rollout.token_ids), 0]] if len(rollout.token_ids) else []


def _trajectory(group: RolloutGroup, i: int) -> int:
    number = group.rollouts[i].trajectory
    return i if number is None else number


def _name(turn: Turn) -> str:
    return "prompt {}, trajectory {}, turn {}".format(*turn)
