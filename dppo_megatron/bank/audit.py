"""Count the contents of a bank, and find sampled tokens that training would repeat, miss or change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dppo_megatron.types import ENVIRONMENT, INHERITED, POLICY, Rollout, RolloutGroup, split_columns

from .checks import check_group
from .errors import BankError
from .files import segment_paths
from .reader import BankReader

TOKENS = {POLICY: "policy tokens", ENVIRONMENT: "environment tokens", INHERITED: "inherited tokens"}
COUNTS = (
    *("groups", "trajectories", "failed trajectories", "branches", "turns"),
    *(*TOKENS.values(), "tokens that carry loss"),
)
Turn = tuple[int, int, int]  # prompt position, trajectory, turn
TOLERANCE = 1e-4  # difference allowed by rounding between a log-prob and its copy in the top-K list, or above 0


@dataclass
class Audit:
    """Contains the counts and problems that an audit found.

    counts: groups, trajectories, branches, turns and tokens by origin.
    problems: a line each.

    Tokens that carry loss are tokens in policy spans of trajectories that did not fail; `objective.overlong_filter` and
    the objective itself may leave out some of these.
    """

    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTS, 0)))
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"{counts}; {len(self.problems)} problems"

    def add(self, group: RolloutGroup) -> dict[Turn, Rollout]:
        """Count and check a group; return the turns as the bank stores them."""
        rollouts: dict[Turn, Rollout] = {}
        contexts: dict[Turn, np.ndarray] = {}  # all tokens up to the turn end
        position = group.prompt.position
        owners = [_trajectory(group, i) for i in range(len(group.rollouts))]
        self.counts["groups"] += 1
        self.counts["trajectories"] += len(set(owners))
        self.counts["failed trajectories"] += len({t for t, f in zip(owners, group.reward_failed, strict=True) if f})
        try:
            check_group(group)
        except ValueError as error:
            self.problems.append(str(error))
            return rollouts
        for i, trajectory in enumerate(owners):
            self.counts["branches"] += 1
            for origin, number, whole, part in spans_of(group, i):
                turn, tokens = (position, trajectory, number), len(part.token_ids)
                self.counts[TOKENS[origin]] += tokens
                if origin == POLICY:
                    self.counts["turns"] += 1
                    self.counts["tokens that carry loss"] += 0 if group.reward_failed[i] else tokens
                    if turn in rollouts:
                        self.problems.append(f"{name_of(turn)}: in two policy spans")
                    self.problems += [f"{name_of(turn)}: {problem}" for problem in _contradictions(part)]
                    rollouts[turn], contexts[turn] = part, whole
                elif origin == INHERITED and not np.array_equal(contexts.get(turn, ()), whole):
                    self.problems.append(f"{name_of(turn)}: inherited otherwise than an earlier branch has it")
        for trajectory in sorted(set(owners)):
            rewarded = 0 if group.turn_rewards is None else len(group.turn_rewards[trajectory])
            turns = {number for _, owner, number in rollouts if owner == trajectory}
            missing = set(range(max([rewarded, *turns]))) - turns
            self.problems += [f"{name_of((position, trajectory, n))}: in no policy span" for n in sorted(missing)]
        return rollouts


def audit_bank(directory: Path) -> Iterator[tuple[int, int, Audit]]:
    """Audit all groups in a bank; yield (groups done, all groups, `Audit`) before the first and after each group.

    Only one group is in memory at a time. An unreadable group is a problem. Groups with a deleted file
    (`checkpoint.keep_rollouts`) are only counted.
    """
    reader, result, done = BankReader(directory), Audit(), 0
    try:
        reader.refresh()
    except BankError as error:
        result.problems.append(str(error))
    result.problems += [] if reader.num_groups or result.problems else [f"{directory}: has no group to audit"]
    yield 0, reader.num_groups, result
    for start, stop in reader.segments():
        try:
            entries = reader.entries(start, stop)
        except BankError as error:
            result.problems.append(str(error))
            continue
        for entry in entries:
            done += 1
            try:
                result.add(reader.read(entry))
            except BankError as error:
                if segment_paths(directory, entry.segment)[0].exists():
                    result.problems.append(str(error))
                else:
                    result.counts["groups whose tokens were deleted"] += 1
            yield done, reader.num_groups, result


def spans_of(group: RolloutGroup, i: int) -> Iterator[tuple[int, int, np.ndarray, Rollout]]:
    """Yield (origin, turn, all tokens up to the span end, the span as a rollout) for each span in branch `i`.

    Spans not written by the policy have columns without rows.
    """
    rollout = group.rollouts[i]
    whole = np.concatenate([group.prompt.token_ids, rollout.token_ids])
    end = len(group.prompt.token_ids)
    spans = [[POLICY, len(rollout.token_ids), 0]] if rollout.spans is None else rollout.spans.tolist()
    sampled = [tokens if origin == POLICY else 0 for origin, tokens, _ in spans]
    for (origin, tokens, number), columns in zip(spans, split_columns(rollout.columns, sampled, None), strict=True):
        if tokens:
            end += tokens
            ids = whole[end - tokens : end]
            span = Rollout.from_columns(columns, token_ids=ids, finish_reason=rollout.finish_reason)
            yield origin, number, whole[:end], span


def _contradictions(turn: Rollout) -> Iterator[str]:
    """Yield the internal contradictions in a turn."""
    if (turn.rollout_logprob > TOLERANCE).any():
        yield "a log-prob above 0"
    if turn.versions.min() < 0 or (np.diff(turn.versions) < 0).any():
        yield "a policy version that is negative, or older than the previous token's"
    if turn.topk_ids is None or turn.rollout_topk_logprob is None:
        return
    matches = turn.topk_ids == turn.token_ids[:, None]
    if (matches.sum(1) > 1).any():
        yield "a sampled token is twice in its top-K list"
    rows, places = np.nonzero(matches)
    if (abs(turn.rollout_topk_logprob[rows, places] - turn.rollout_logprob[rows]) > TOLERANCE).any():
        yield "a log-prob that differs from the one in its top-K list"


def _trajectory(group: RolloutGroup, i: int) -> int:
    number = group.rollouts[i].trajectory
    return i if number is None else number


def name_of(turn: Turn) -> str:
    return "prompt {}, trajectory {}, turn {}".format(*turn)
