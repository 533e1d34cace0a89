"""From sequences to a packed micro-batch: tensors for the part of a plan (`micro_batches`) that is this rank's."""

from __future__ import annotations

import itertools
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


def pack(sequences: Sequence[TokenSequence], *, topk: int = 0, share_prefixes: bool = False) -> TokenBatch:
    """One micro-batch on the CPU, sequences end to end in the given order.

    All sequences must have the same optional fields, those that the result has.
    Without sequences the result is a filler: a single masked token with zero loss weight, rollout fields and
    `topk` top-K entries, so that a rank with nothing to do runs the same collectives as the others.
    share_prefixes: a prompt that is the same as that of the sequence before is to be computed once.
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
    if share_prefixes:
        batch["shared_prefix"] = torch.tensor(_shared_prefixes(sequences), dtype=torch.int32)
    if not finite:
        raise ValueError(
            "a loss_weight or advantage is not finite; it would make the gradient not finite of the whole batch"
        )
    return TokenBatch(**batch)


def _shared_prefixes(sequences: Sequence[TokenSequence]) -> list[int]:
    """Of each sequence the prompt tokens that are those of the one before it: all or none."""
    shared = [0]
    for before, own in itertools.pairwise(s.prompt_ids for s in sequences):
        shared.append(len(own) if own is before or np.array_equal(own, before) else 0)
    return shared


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
