"""From sequences to packed micro-batches: a plan on lengths alone, then tensors for this rank's part."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dppo_megatron.types import POLICY, Prompt, Rollout, TokenBatch


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt with the response to learn from. Supervised sequences have no rollout fields.

    Of the S response tokens R are learned from: all, or those of `sampled`. The others are read and nothing else.
    """

    prompt_ids: np.ndarray  # [P] int32, at least one token: it predicts the first of the response
    response_ids: np.ndarray  # [S] int32
    loss_weight: float  # of every token that is learned from, its share of the global batch; 0 = carries no loss
    advantage: float | np.ndarray | None = None  # scalar or [R] fp32
    rollout_logprob: np.ndarray | None = None  # [R] fp32
    temperature: float = 1.0
    topk_ids: np.ndarray | None = None  # [R, K] int32, -1 = absent
    rollout_topk_logprob: np.ndarray | None = None  # [R, K] fp32
    routed_experts: np.ndarray | None = None  # [P + S - 1, L, k] of every token but the last, for routing replay
    sampled: np.ndarray | None = None  # [S] bool, R of them; None: all
    kept_ids: np.ndarray | None = None  # [sum of kept_counts] int32, what each token was drawn from; None = everything
    kept_counts: np.ndarray | None = None  # [R] int32

    @classmethod
    def of_rollout(
        cls,
        prompt: Prompt,
        rollout: Rollout,
        *,
        advantage: float | np.ndarray,
        loss_weight: float,
        temperature: float = 1.0,
        replay_routing: bool = False,
    ) -> TokenSequence:
        """A sampled response with the log-probs, and if requested the routing, of the policy that sampled it."""
        return cls(
            prompt.token_ids,
            rollout.token_ids,
            loss_weight,
            advantage,
            rollout.rollout_logprob,
            temperature,
            rollout.topk_ids,
            rollout.rollout_topk_logprob,
            rollout.routed_experts if replay_routing else None,
            None if rollout.spans is None else np.repeat(rollout.spans[:, 0] == POLICY, rollout.spans[:, 1]),
            rollout.kept_ids,
            rollout.kept_counts,
        )

    @classmethod
    def of_answer(cls, prompt: Prompt, answer_ids: np.ndarray, *, loss_weight: float) -> TokenSequence:
        """A given answer to imitate (nll)."""
        return cls(prompt.token_ids, answer_ids, loss_weight)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def learned(self) -> int:
        """R."""
        return len(self.response_ids) if self.sampled is None else int(self.sampled.sum())


def plan_micro_batches(lengths: Sequence[int] | np.ndarray, data_parallel: int, budget: int) -> list[list[list[int]]]:
    """Splits sequences of the given lengths over ranks and micro-batches.

    lengths: tokens of each sequence. budget: most tokens of a micro-batch; a longer sequence gets one of its
    own.
    Returns `plan[rank][micro_batch]` -> ascending indices into `lengths`. Every index occurs once; every rank
    has the same number of micro-batches, at least one, some possibly empty; the token counts of two ranks
    differ by at most the longest sequence. Largest micro-batches come first, so that memory runs out at once
    or not at all.
    Equal arguments give equal plans. Raises `ValueError` for lengths, ranks or a budget below 1.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if data_parallel < 1 or budget < 1 or (len(sizes) and sizes.min() < 1):
        raise ValueError(f"lengths, data_parallel = {data_parallel} and budget = {budget} must all be at least 1")
    order = np.argsort(-sizes, kind="stable")
    ordered = sizes[order].tolist()
    bins = _fewest_bins(ordered, data_parallel, budget)
    totals = [sum(ordered[i] for i in members) for members in bins]
    by_load = sorted(range(len(bins)), key=lambda b: (-totals[b], b))
    plan: list[list[list[int]]] = [[] for _ in range(data_parallel)]
    loads = [0] * data_parallel
    for start in range(0, len(bins), data_parallel):
        # One of each round's near-equal bins to every rank, the largest to the rank that has least.
        ranks = sorted(range(data_parallel), key=lambda rank: (loads[rank], rank))
        for rank, b in zip(ranks, by_load[start : start + data_parallel], strict=True):
            plan[rank].append(sorted(order[bins[b]].tolist()))
            loads[rank] += totals[b]
    return plan


def pack(sequences: Sequence[TokenSequence], *, topk: int = 0) -> TokenBatch:
    """One micro-batch on the CPU, sequences end to end in the given order.

    All sequences must have the same optional fields, those that the result has.
    Without sequences the result is a filler: a single masked token with zero loss weight, rollout fields and
    `topk` top-K entries, so that a rank with nothing to do runs the same collectives as the others.
    Raises `ValueError` for an empty prompt, fields whose lengths or presence disagree, and weights or
    advantages that are not finite.
    """
    _check(sequences)
    if not sequences:
        return _filler(topk)
    prompt_sizes = np.array([len(s.prompt_ids) for s in sequences])
    response_sizes = np.array([len(s.response_ids) for s in sequences])
    sizes = prompt_sizes + response_sizes
    ends = np.cumsum(sizes)
    starts = ends - sizes
    total = int(ends[-1])

    # Response token j is predicted by the row before it: start + P + j - 1.
    responses = int(response_sizes.sum())
    before = np.cumsum(response_sizes) - response_sizes
    rows = np.repeat(starts + prompt_sizes - 1 - before, response_sizes) + np.arange(responses)
    targets = np.concatenate([s.response_ids for s in sequences])
    learned_sizes = np.array([s.learned for s in sequences])
    whole = learned_sizes.sum() == responses
    if not whole:
        sampled = [np.ones(len(s.response_ids), np.bool_) if s.sampled is None else s.sampled for s in sequences]
        rows, targets = (of_all[np.concatenate(sampled)] for of_all in (rows, targets))

    def per_row(values: Any, dtype: Any, fill: float = 0) -> torch.Tensor:
        values = np.asarray(values)
        out = np.full((total, *values.shape[1:]), fill, dtype=dtype)
        out[rows] = values
        return torch.from_numpy(out)

    def of_lists(values: list[np.ndarray], dtype: Any, fill: float) -> torch.Tensor:
        """`per_row` of [R, K] each, copied once: of long responses top-K lists are most of the bytes."""
        if not whole:
            return per_row(np.concatenate(values), dtype, fill)
        gaps = prompt_sizes - (np.arange(len(sizes)) == 0)  # rows before a response and after the one before it
        filling = np.full((max(int(gaps.max()), 1), values[0].shape[1]), fill, dtype=dtype)
        pieces = [piece for gap, value in zip(gaps, values, strict=True) for piece in (filling[:gap], value)]
        return torch.from_numpy(np.concatenate([*pieces, filling[:1]], dtype=dtype))

    def per_response(values: list[Any]) -> np.ndarray:
        return np.repeat(np.array(values, dtype=np.float32), learned_sizes)

    token_ids = np.concatenate([part for s in sequences for part in (s.prompt_ids, s.response_ids)])
    positions = np.arange(total) - np.repeat(starts, sizes)
    loss_weight = per_response([s.loss_weight for s in sequences])
    carries_loss = loss_weight != 0
    finite = np.isfinite(loss_weight).all()
    batch: dict[str, torch.Tensor] = {
        "token_ids": torch.from_numpy(token_ids.astype(np.int64)),
        "position_ids": torch.from_numpy(positions),
        "cu_seqlens": torch.tensor([0, *ends.tolist()], dtype=torch.int32),
        "target_ids": per_row(np.where(carries_loss, targets, 0), np.int64),
        "mask": per_row(carries_loss, np.bool_),
        "loss_weight": per_row(loss_weight, np.float32),
    }
    first = sequences[0]
    if first.rollout_logprob is not None:
        if any(isinstance(s.advantage, np.ndarray) for s in sequences):
            advantage = np.concatenate([np.broadcast_to(s.advantage, s.learned) for s in sequences])
        else:
            advantage = per_response([s.advantage for s in sequences])
        finite &= np.isfinite(advantage).all()
        temperature = np.repeat(np.array([s.temperature for s in sequences], dtype=np.float32), sizes)
        batch["advantage"] = per_row(advantage, np.float32)
        batch["rollout_logprob"] = per_row(np.concatenate([s.rollout_logprob for s in sequences]), np.float32)
        batch["temperature"] = torch.from_numpy(temperature)
    if first.topk_ids is not None:
        batch["topk_ids"] = of_lists([s.topk_ids for s in sequences], np.int32, fill=-1)
        batch["rollout_topk_logprob"] = of_lists([s.rollout_topk_logprob for s in sequences], np.float32, fill=0)
    if first.kept_counts is not None:
        counts = np.concatenate([s.kept_counts for s in sequences])
        kept_ids = np.concatenate([s.kept_ids for s in sequences])
        batch["kept_ids"] = torch.from_numpy(kept_ids[np.repeat(carries_loss, counts)].astype(np.int32))
        batch["kept_counts"] = per_row(np.where(carries_loss, counts, 0), np.int32)
    if first.routed_experts is not None:
        # A response's last token is not read when sampling: the trainer routes it itself, and nothing depends on it.
        routed = np.empty((total, *first.routed_experts.shape[1:]), dtype=np.int16)
        routed[ends - 1] = -1
        for start, size, s in zip(starts, sizes, sequences, strict=True):
            routed[start : start + size - 1] = s.routed_experts
        batch["routed_experts"] = torch.from_numpy(routed)
    if not finite:
        raise ValueError(
            "a loss_weight or advantage is not finite; it would make the gradient not finite of the whole batch"
        )
    return TokenBatch(**batch)


def _filler(topk: int) -> TokenBatch:
    zeros = torch.zeros(1)
    return TokenBatch(
        token_ids=zeros.long(),
        position_ids=zeros.long(),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        target_ids=zeros.long(),
        mask=zeros.bool(),
        loss_weight=zeros.clone(),
        advantage=zeros.clone(),
        rollout_logprob=zeros.clone(),
        temperature=torch.ones(1),
        topk_ids=torch.full((1, topk), -1, dtype=torch.int32) if topk else None,
        rollout_topk_logprob=torch.zeros(1, topk) if topk else None,
    )


def _fewest_bins(ordered: list[int], multiple: int, budget: int) -> list[list[int]]:
    """Indices into `ordered` (descending) in the fewest bins, a multiple of `multiple`, that suffice."""
    filled = sum(min(size, budget) for size in ordered)
    needed = max(math.ceil(filled / budget), sum(size > budget / 2 for size in ordered), 1)
    low, high = math.ceil(needed / multiple), math.ceil(max(len(ordered), 1) / multiple)
    if (bins := _fill(ordered, low * multiple, budget)) is not None:
        return bins
    low += 1
    best: list[list[int]] | None = None
    step = 1  # from below, where it nearly always is: doubling, then by halves
    while low < high:
        middle = min(low + step - 1, (low + high) // 2)
        if (bins := _fill(ordered, middle * multiple, budget)) is not None:
            best, high, step = bins, middle, high
        else:
            low, step = middle + 1, 2 * step
    # With a bin for every sequence the filling cannot fail.
    return best or _fill(ordered, high * multiple, budget) or []


def _fill(ordered: list[int], count: int, budget: int) -> list[list[int]] | None:
    """Longest first, each into the emptiest bin; None when one does not fit there, and so nowhere."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for index, size in enumerate(ordered):
        load, b = heap[0]
        if load and load + size > budget:
            return None
        bins[b].append(index)
        heapq.heapreplace(heap, (load + size, b))
    return bins


def _check(sequences: Sequence[TokenSequence]) -> None:
    for index, s in enumerate(sequences):
        if problem := _problem(s, sequences[0]):
            raise ValueError(f"sequence {index}: {problem}")


def _problem(s: TokenSequence, first: TokenSequence) -> str:
    if s.sampled is not None and s.sampled.shape != s.response_ids.shape:
        return f"{len(s.sampled)} marks of sampled tokens for {len(s.response_ids)} response tokens"
    learned = s.learned
    width = _width(first.topk_ids)
    if len(s.prompt_ids) == 0:
        return "empty prompt: nothing predicts the first response token"
    if (s.rollout_logprob is None) != (first.rollout_logprob is None) or _width(s.topk_ids) != width:
        return "rollout log-probs or top-K differ from those of sequence 0 in presence or K"
    if s.rollout_logprob is not None and (s.advantage is None or len(s.rollout_logprob) != learned):
        return "a rollout needs an advantage and one log-prob per sampled token"
    if s.topk_ids is not None and (
        s.rollout_topk_logprob is None or not s.topk_ids.shape == s.rollout_topk_logprob.shape == (learned, width)
    ):
        return f"top-K ids and log-probs must both be [{learned}, {width}]"
    if (s.kept_counts is None) != (first.kept_counts is None) or (s.kept_ids is None) != (s.kept_counts is None):
        return "kept ids and counts must both be there, as in sequence 0, or neither"
    if s.kept_counts is not None and (len(s.kept_counts) != learned or int(s.kept_counts.sum()) != len(s.kept_ids)):
        return f"{len(s.kept_ids)} kept ids with {len(s.kept_counts)} counts, {learned} sampled tokens"
    routed = None if s.routed_experts is None else s.routed_experts.shape
    if (routed is None) != (first.routed_experts is None) or (
        routed is not None and routed != (len(s) - 1, *first.routed_experts.shape[1:])
    ):
        return f"routed experts {routed}: expected one row for each of {len(s) - 1} tokens, or none as in sequence 0"
    return ""


def _width(array: np.ndarray | None) -> int | None:
    return None if array is None else array.shape[1]
