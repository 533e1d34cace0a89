"""Check a group before it enters the bank, because training would not notice a wrong dtype or length."""

from __future__ import annotations

from typing import Any

import numpy as np

from dppo_megatron.types import COLUMNS, INHERITED, POLICY, Rollout, RolloutGroup, column_named, expected_shapes

FINISH_REASONS = ("stop", "length", "max_turns", "abort")


def check_group(group: RolloutGroup) -> None:
    """Raise `ValueError` for arrays with a wrong length or dtype, non-finite values and contradictions."""
    where = f"group of prompt position {group.prompt.position}"
    n = len(group.rollouts)
    if n == 0:
        raise ValueError(f"{where}: no rollouts; call `drop` for a prompt without rollouts")
    if group.prompt.position < 0 or group.prompt.row < 0:
        raise ValueError(f"{where}, row {group.prompt.row}: expected a position and a row of at least 0")
    _expect(group.prompt.token_ids, np.int32, (len(group.prompt.token_ids),), f"{where}: prompt token_ids")
    _expect(group.rewards, np.float32, (n,), f"{where}: rewards")
    _expect(group.reward_failed, np.bool_, (n,), f"{where}: reward_failed")
    _expect_finite(group.rewards, f"{where}: rewards", "where a verifier fails, store 0 and set reward_failed")
    if not (np.isfinite(group.temperature) and group.temperature > 0):
        raise ValueError(f"{where}: temperature = {group.temperature}: expected the engine's, which is above 0")
    for i, rollout in enumerate(group.rollouts):
        _check_sample(rollout, group, f"{where}, sample {i}")
    _check_trajectories(group, where)


def _check_sample(r: Rollout, group: RolloutGroup, where: str) -> None:
    size = len(r.token_ids)
    _expect(r.token_ids, np.int32, (size,), f"{where}: token_ids")
    sampled = size if r.spans is None else _check_spans(r, where)
    if r.finish_reason not in FINISH_REASONS:
        raise ValueError(f"{where}: finish_reason {r.finish_reason!r}, expected one of {FINISH_REASONS}")
    _check_columns(r, group, sampled, where)
    _expect_finite(r.rollout_logprob, f"{where}: rollout_logprob", "the engine sampled the token, so it has a log-prob")
    if r.sampling_mask_ids is not None and sampled:
        _check_mask(r, where)
    if r.routed_experts is not None:
        twice = np.argwhere(np.diff(np.sort(r.routed_experts, axis=2), axis=2) == 0)
        if len(twice):
            token, layer, _ = twice[0].tolist()
            experts = r.routed_experts[token, layer].tolist()
            raise ValueError(
                f"{where}: routed_experts of token {token} in MoE layer {layer} are {experts}, which names the same "
                "expert twice; an engine sends a token to different experts"
            )


def _check_columns(r: Rollout, group: RolloutGroup, sampled: int, where: str) -> None:
    """Check every column's presence, dtype and shape against `COLUMNS`; sample 0 gives the trailing sizes."""
    first, columns = group.rollouts[0].columns, r.columns
    num_read = len(group.prompt.token_ids) + len(r.token_ids) - 1
    for field in dict.fromkeys(c.asked_by for c in COLUMNS if c.asked_by):
        column_names = [c.name for c in COLUMNS if c.asked_by == field]
        if len({name in sample for name in column_names for sample in (first, columns)}) > 1:
            raise ValueError(f"{where}: {' and '.join(column_names)} must be present in all samples or in none")
    for name, shape in expected_shapes(columns, sampled, num_read, first).items():
        column = column_named(name)
        if column.asked_by and name not in columns:
            continue
        dtype = str(getattr(first.get(name), "dtype", ""))
        dtype = dtype if dtype in column.dtypes else column.dtypes[0]
        _expect(columns.get(name), np.dtype(dtype), shape, f"{where}: {name}")


def _check_spans(r: Rollout, where: str) -> int:
    """Check the spans and return the number of tokens that the policy sampled."""
    spans: Any = r.spans
    _expect(spans, np.int32, (len(spans), 3), f"{where}: spans")
    origins, tokens, turns = spans.T
    if not len(spans) or tokens.min() < 1 or tokens.sum() != len(r.token_ids):
        raise ValueError(
            f"{where}: spans have {tokens.tolist()} tokens, expected at least 1 each and {len(r.token_ids)} together"
        )
    if origins.min() < POLICY or origins.max() > INHERITED or turns[0] < 0 or (np.diff(turns) < 0).any():
        raise ValueError(
            f"{where}: spans have origins {origins.tolist()} and turns {turns.tolist()}, expected origins within "
            f"[{POLICY}, {INHERITED}], and turns from 0 that do not decrease"
        )
    return int(tokens[origins == POLICY].sum())


def _check_mask(r: Rollout, where: str) -> None:
    tokens = r.token_ids if r.sampled is None else r.token_ids[r.sampled]
    counts: Any = r.sampling_mask_counts
    matches = r.sampling_mask_ids == np.repeat(tokens, counts)
    if counts.min() < 1 or not np.add.reduceat(matches, np.cumsum(counts) - counts).all():
        raise ValueError(f"{where}: a sampled token is not among the sampling_mask_ids from which it was drawn")


def _check_trajectories(group: RolloutGroup, where: str) -> None:
    numbers = [r.trajectory for r in group.rollouts]
    if len({number is None for number in numbers}) > 1:
        raise ValueError(f"{where}: trajectories {numbers}, expected a number for each sample, or None for each")
    if numbers[0] is None:
        numbers = list(range(len(numbers)))
    begins = [i for i, number in enumerate(numbers) if number not in numbers[:i]]
    if sorted(numbers) != numbers or [numbers[i] for i in begins] != list(range(len(begins))):  # type: ignore[type-var]
        raise ValueError(f"{where}: trajectories {numbers}, expected 0, 1, 2, ... with adjacent branches, as 0, 0, 1")
    for i in begins:
        spans = group.rollouts[i].spans
        if spans is not None and (spans[:, 0] == INHERITED).any():
            raise ValueError(f"{where}, sample {i}: the first branch of a trajectory cannot have inherited tokens")
    if not np.array_equal(group.rewards, group.rewards[[begins[t] for t in numbers]]):  # type: ignore[index]
        raise ValueError(
            f"{where}: rewards {group.rewards.tolist()} of trajectories {numbers}, expected equal rewards for all "
            "branches of a trajectory"
        )
    if group.turn_rewards is None:
        return
    if len(group.turn_rewards) != len(begins):
        raise ValueError(
            f"{where}: turn_rewards of {len(group.turn_rewards)} trajectories, the samples belong to {len(begins)}"
        )
    for number, rewards in enumerate(group.turn_rewards):
        name = f"{where}, trajectory {number}: turn_rewards"
        _expect(rewards, np.float32, (len(rewards),), name)
        _expect_finite(rewards, name, "let the environment return 0.0 for a turn without a reward")


def _expect_finite(values: np.ndarray, name: str, remedy: str) -> None:
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise ValueError(
            f"{name}[{wrong[0]}] = {values[wrong[0]]}: not finite, which would make the gradient of the whole step not "
            f"finite; {remedy}"
        )


def _expect(array: Any, dtype: Any, shape: tuple[int, ...], name: str) -> None:
    # A cast would hide log-probs that passed through half precision. These bias every ratio.
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
        actual = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{name}: expected numpy {np.dtype(dtype).name} {shape}, found {actual}")
