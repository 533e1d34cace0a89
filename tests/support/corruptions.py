"""Damages a bank but keeps all checksums right, and lists the audit's messages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dppo_megatron.bank import BankWriter
from dppo_megatron.types import ENVIRONMENT, INHERITED, POLICY, Rollout, RolloutGroup

OF_SAMPLED = ("rollout_logprob", "versions", "topk_ids", "rollout_topk_logprob")
Place = tuple[int, int, int, int]  # branch, span, first token, first sampled token


def write(
    directory: Path, groups: Sequence[RolloutGroup], damage: Callable[[RolloutGroup], RolloutGroup | None]
) -> str:
    """Write a bank of `groups` and damage the first group that allows it. Return how the audit names its prompt."""
    damaged = ""
    with BankWriter(directory, len(groups), fsync=False) as bank:
        for group in groups:
            wrong = None if damaged else damage(group)
            if wrong is not None:
                damaged = f"prompt {group.prompt.position}, "
            bank.append(group if wrong is None else wrong)
    assert damaged, "no group can be damaged so"
    return damaged


def in_two_spans(group: RolloutGroup) -> RolloutGroup | None:
    """Make an inherited span count as trained, too."""
    for i, span, _, row in _places(group, INHERITED):
        heir = group.rollouts[i]
        turn, tokens = heir.spans[span, 2], heir.spans[span, 1]
        first = next(
            (j, r)
            for j, s, _, r in _places(group, POLICY)
            if group.rollouts[j].trajectory == heir.trajectory and group.rollouts[j].spans[s, 2] == turn
        )
        spans = heir.spans.copy()
        spans[span, 0] = POLICY
        rows = {}
        for name in OF_SAMPLED:
            if (own := getattr(heir, name)) is not None:
                whole = getattr(group.rollouts[first[0]], name)[first[1] : first[1] + tokens]
                rows[name] = np.concatenate([own[:row], whole, own[row:]])
        return _with(group, i, replace(heir, spans=spans, **rows))
    return None


def in_no_span(group: RolloutGroup) -> RolloutGroup | None:
    """Remove a turn with its tokens, if another turn follows."""
    for i, span, token, row in _places(group, POLICY):
        rollout = group.rollouts[i]
        size = int(rollout.spans[span, 1])
        if span + 1 < len(rollout.spans) and (rollout.spans[span + 1 :, 0] == POLICY).any():
            kept = np.delete(rollout.token_ids, slice(token, token + size))
            without = replace(rollout, token_ids=kept, spans=np.delete(rollout.spans, span, 0))
            return _with(group, i, _without_rows(without, row, size))
    return None


def swallowed(group: RolloutGroup) -> RolloutGroup | None:
    """Mark a turn as the environment's, if another turn follows."""
    for i, span, _, row in _places(group, POLICY):
        rollout = group.rollouts[i]
        if (rollout.spans[span + 1 :, 0] == POLICY).any():
            spans = rollout.spans.copy()
            spans[span, 0] = ENVIRONMENT
            return _with(group, i, _without_rows(replace(rollout, spans=spans), row, int(spans[span, 1])))
    return None


def inherited_otherwise(group: RolloutGroup) -> RolloutGroup | None:
    for i, _, token, _ in _places(group, INHERITED):
        ids = group.rollouts[i].token_ids.copy()
        ids[token] += 1 if ids[token] == 0 else -1
        return _with(group, i, replace(group.rollouts[i], token_ids=ids))
    return None


def another_logprob(group: RolloutGroup) -> RolloutGroup | None:
    """Change a token's log-prob so that the top-K list has another value."""
    for i, span, token, row in _places(group, POLICY):
        rollout = group.rollouts[i]
        size = rollout.spans[span, 1]
        own = rollout.token_ids[token : token + size, None]
        listed = np.flatnonzero((rollout.topk_ids[row : row + size] == own).any(1))
        if len(listed):
            values = rollout.rollout_logprob.copy()
            values[row + listed[0]] -= 0.01
            return _with(group, i, replace(rollout, rollout_logprob=values))
    return None


def older_version(group: RolloutGroup) -> RolloutGroup | None:
    """Make the second token of a turn older than the first token."""
    for i, span, _, row in _places(group, POLICY):
        rollout = group.rollouts[i]
        if rollout.spans[span, 1] > 1:
            versions = rollout.versions.copy()
            versions[row] += 1
            return _with(group, i, replace(rollout, versions=versions))
    return None


FROM_THE_BANK_ALONE = {
    in_two_spans: "in two policy spans",
    in_no_span: "in no policy span",
    swallowed: "in no policy span",
    inherited_otherwise: "inherited otherwise than an earlier branch has it",
    another_logprob: "a log-prob that differs from the one in its top-K list",
    older_version: "a policy version that is negative, or older than the previous token's",
}


def logprobs_and_lists(group: RolloutGroup) -> RolloutGroup | None:
    first = group.rollouts[0]
    lists = first.rollout_topk_logprob - 0.01
    return _with(group, 0, replace(first, rollout_logprob=first.rollout_logprob - 0.01, rollout_topk_logprob=lists))


def versions(group: RolloutGroup) -> RolloutGroup | None:
    return _with(group, 0, replace(group.rollouts[0], versions=group.rollouts[0].versions + 1))


def ends_early(group: RolloutGroup) -> RolloutGroup | None:
    """Mark the last token of a turn as the environment's."""
    for i, span, _, row in _places(group, POLICY):
        rollout = group.rollouts[i]
        kind, size, turn = rollout.spans[span].tolist()
        if size > 1:
            ends = [[kind, size - 1, turn], [ENVIRONMENT, 1, turn]]
            spans = np.concatenate([rollout.spans[:span], ends, rollout.spans[span + 1 :]]).astype(np.int32)
            return _with(group, i, _without_rows(replace(rollout, spans=spans), row + size - 1, 1))
    return None


# A consistently changed bank shows only when compared with the engine's replies.
FROM_THE_ENGINES_RECORD = {
    logprobs_and_lists: "rollout_logprob, rollout_topk_logprob differ from what was sampled",
    versions: "versions differ from what was sampled",
    ends_early: "token_ids, rollout_logprob, versions, topk_ids, rollout_topk_logprob differ from what was sampled",
}


def _places(group: RolloutGroup, origin: int) -> list[Place]:
    """Return all spans of an origin."""
    found = []
    for i, rollout in enumerate(group.rollouts):
        token = row = 0
        for span, (kind, tokens, _) in enumerate(() if rollout.spans is None else rollout.spans.tolist()):
            if kind == origin:
                found.append((i, span, token, row))
            token, row = token + tokens, row + (tokens if kind == POLICY else 0)
    return found


def _without_rows(rollout: Rollout, begin: int, count: int) -> Rollout:
    lost = slice(begin, begin + count)
    rows = {name: None if (of := getattr(rollout, name)) is None else np.delete(of, lost, 0) for name in OF_SAMPLED}
    return replace(rollout, **rows)


def _with(group: RolloutGroup, i: int, rollout: Rollout) -> RolloutGroup:
    return replace(group, rollouts=(*group.rollouts[:i], rollout, *group.rollouts[i + 1 :]))
