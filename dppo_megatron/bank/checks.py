"""What a group must be before it may enter the bank: a wrong dtype or length there would be trained on unseen."""

from __future__ import annotations

from typing import Any

import numpy as np

from dppo_megatron.types import INHERITED, POLICY, Rollout, RolloutGroup

FINISH_REASONS = ("stop", "length", "max_turns", "abort")


def check_group(group: RolloutGroup) -> None:
    """Raises `ValueError` for arrays of wrong length or dtype or not finite, and for what contradicts itself."""
    where = f"group of prompt position {group.prompt.position}"
    n = len(group.rollouts)
    if n == 0:
        raise ValueError(f"{where}: no rollouts; record the prompt with drop() instead")
    if group.prompt.position < 0 or group.prompt.row < 0:
        raise ValueError(f"{where}: position and row count from 0")
    _expect(group.prompt.token_ids, np.int32, (len(group.prompt.token_ids),), f"{where}: prompt token_ids")
    _expect(group.rewards, np.float32, (n,), f"{where}: rewards")
    _expect(group.reward_failed, np.bool_, (n,), f"{where}: reward_failed")
    if not np.isfinite(group.rewards).all():
        raise ValueError(f"{where}: rewards hold {group.rewards}; a failed verifier scores 0 with reward_failed set")
    if not (np.isfinite(group.temperature) and group.temperature > 0):
        raise ValueError(f"{where}: temperature is {group.temperature}, expected > 0")
    for i, rollout in enumerate(group.rollouts):
        _check_sample(rollout, group, f"{where}, sample {i}")
    _check_trajectories(group, where)


def _check_sample(r: Rollout, group: RolloutGroup, where: str) -> None:
    first = group.rollouts[0]
    size = len(r.token_ids)
    _expect(r.token_ids, np.int32, (size,), f"{where}: token_ids")
    sampled = size if r.spans is None else _check_spans(r, where)
    _expect(r.rollout_logprob, np.float32, (sampled,), f"{where}: rollout_logprob")
    _expect(r.versions, np.int32, (sampled,), f"{where}: versions")
    if r.finish_reason not in FINISH_REASONS:
        raise ValueError(f"{where}: finish_reason {r.finish_reason!r}, expected one of {FINISH_REASONS}")
    if not np.isfinite(r.rollout_logprob).all():
        raise ValueError(f"{where}: a sampled token has a log-prob that is not finite")
    topk = first.topk_ids
    if (r.topk_ids is None) != (topk is None) or (r.rollout_topk_logprob is None) != (topk is None):
        raise ValueError(f"{where}: top-K ids and log-probs must be present in all samples or in none")
    if topk is not None:
        shape = (sampled, *topk.shape[1:])
        _expect(r.topk_ids, np.int32, shape, f"{where}: topk_ids")
        _expect(r.rollout_topk_logprob, np.float32, shape, f"{where}: rollout_topk_logprob")
    _check_mask(r, first, sampled, where)
    _check_routing(r, group, f"{where}: routed_experts")


def _check_spans(r: Rollout, where: str) -> int:
    """Tokens that the policy sampled."""
    spans: Any = r.spans
    _expect(spans, np.int32, (len(spans), 3), f"{where}: spans")
    origins, tokens, turns = spans.T
    if not len(spans) or tokens.min() < 1 or tokens.sum() != len(r.token_ids):
        raise ValueError(f"{where}: spans must each have a token, and {len(r.token_ids)} tokens in all")
    if origins.min() < POLICY or origins.max() > INHERITED or turns[0] < 0 or (np.diff(turns) < 0).any():
        raise ValueError(f"{where}: spans have an origin from {POLICY} to {INHERITED} and turns that do not decrease")
    return int(tokens[origins == POLICY].sum())


def _check_mask(r: Rollout, first: Rollout, sampled: int, where: str) -> None:
    if len({x is None for x in (r.kept_ids, r.kept_counts, first.kept_ids)}) > 1:
        raise ValueError(f"{where}: kept_ids and kept_counts must be present in all samples or in none")
    if r.kept_ids is None or r.kept_counts is None:
        return
    _expect(r.kept_counts, np.int32, (sampled,), f"{where}: kept_counts")
    _expect(r.kept_ids, np.int32, (int(r.kept_counts.sum()),), f"{where}: kept_ids")
    tokens = r.token_ids
    if r.spans is not None:
        tokens = tokens[np.repeat(r.spans[:, 0] == POLICY, r.spans[:, 1])]
    if sampled == 0:
        return
    found = r.kept_ids == np.repeat(tokens, r.kept_counts)
    starts = np.cumsum(r.kept_counts) - r.kept_counts
    if r.kept_counts.min() < 1 or not np.add.reduceat(found, starts).all():
        raise ValueError(f"{where}: a sampled token is not among the kept_ids that it was drawn from")


def _check_routing(rollout: Rollout, group: RolloutGroup, what: str) -> None:
    routed, first = rollout.routed_experts, group.rollouts[0].routed_experts
    if (routed is None) != (first is None):
        raise ValueError(f"{what}: must be present in all samples or in none")
    if routed is None or first is None:
        return
    read = len(group.prompt.token_ids) + len(rollout.token_ids) - 1
    dtype = first.dtype if first.dtype in (np.uint8, np.uint16) else np.uint8
    _expect(routed, dtype, (read, *first.shape[1:]), what)
    if routed.ndim != 3:
        raise ValueError(f"{what}: expected [tokens, layers, experts per token], found {routed.shape}")
    if (np.diff(np.sort(routed, axis=2), axis=2) == 0).any():
        raise ValueError(f"{what}: a token was sent to the same expert twice")


def _check_trajectories(group: RolloutGroup, where: str) -> None:
    numbers = [r.trajectory for r in group.rollouts]
    if len({number is None for number in numbers}) > 1:
        raise ValueError(f"{where}: all samples must name their trajectory, or none")
    if numbers[0] is None:
        numbers = list(range(len(numbers)))
    begins = [i for i, number in enumerate(numbers) if number not in numbers[:i]]
    if sorted(numbers) != numbers or [numbers[i] for i in begins] != list(range(len(begins))):  # type: ignore[type-var]
        raise ValueError(f"{where}: trajectories {numbers}, expected 0, 1, 2, ... with their branches side by side")
    for i in begins:
        spans = group.rollouts[i].spans
        if spans is not None and (spans[:, 0] == INHERITED).any():
            raise ValueError(f"{where}, sample {i}: the first branch of a trajectory inherits from none")
    if not np.array_equal(group.rewards, group.rewards[[begins[t] for t in numbers]]):  # type: ignore[index]
        raise ValueError(f"{where}: branches of one trajectory have different rewards")
    if group.turn_rewards is None:
        return
    if len(group.turn_rewards) != len(begins):
        raise ValueError(f"{where}: turn_rewards of {len(group.turn_rewards)} trajectories, there are {len(begins)}")
    for rewards in group.turn_rewards:
        _expect(rewards, np.float32, (len(rewards),), f"{where}: turn_rewards")
        if not np.isfinite(rewards).all():
            raise ValueError(f"{where}: turn_rewards hold {rewards}")


def _expect(array: Any, dtype: Any, shape: tuple[int, ...], what: str) -> None:
    # No silent cast: log-probs that went through half precision would bias every ratio unseen.
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{what}: expected numpy {np.dtype(dtype).name} {shape}, found {found}")
