"""Pack sequences into a micro-batch: tensors for this rank's part of a plan (`micro_batches`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dppo_megatron.types import COLUMNS, Column, Prompt, Rollout, TokenBatch, expected_shapes

Sizes = Mapping[str, tuple[int, ...]]  # trailing shapes of columns by name


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Contains a prompt with the response to learn from. Supervised sequences have no columns.

    The loss covers R of S response tokens: all, or the tokens marked in `sampled`. The others are only context.
    """

    prompt_ids: np.ndarray  # [P] int32, at least 1; the last token predicts the first response token
    response_ids: np.ndarray  # [S] int32
    loss_weight: float  # loss weight per learned token, as a share of the global batch; 0 = no loss
    advantage: float | np.ndarray | None = None  # scalar or [R] fp32
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # values of R tokens, by the names in `COLUMNS`
    temperature: float = 1.0
    sampled: np.ndarray | None = None  # [S] bool, R of them True; None: all

    @classmethod
    def from_rollout(
        cls,
        prompt: Prompt,
        rollout: Rollout,
        *,
        advantage: float | np.ndarray,
        loss_weight: float,
        temperature: float = 1.0,
        replay_routing: bool = False,
    ) -> TokenSequence:
        """Build a sequence from a sampled response, with the policy's values and, if requested, the routing."""
        columns = {
            c.name: rollout.column(c.name) for c in COLUMNS if c.packed and (c.part != "routes" or replay_routing)
        }
        columns = {name: array for name, array in columns.items() if array is not None}
        return cls(prompt.token_ids, rollout.token_ids, loss_weight, advantage, columns, temperature, rollout.sampled)

    @classmethod
    def from_answer(cls, prompt: Prompt, answer_ids: np.ndarray, *, loss_weight: float) -> TokenSequence:
        """Build a sequence from a given answer to imitate (nll)."""
        return cls(prompt.token_ids, answer_ids, loss_weight)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def learned(self) -> int:
        """Return R, the number of tokens to learn from."""
        return len(self.response_ids) if self.sampled is None else int(self.sampled.sum())


def pack(sequences: Sequence[TokenSequence], *, like: Sizes | None = None, share_prefixes: bool = False) -> TokenBatch:
    """Pack a micro-batch on the CPU, sequences end to end in the given order; `TokenBatch` has an example.

    All sequences must have the same columns, which the result also has. Without sequences the result is a filler,
    so that a rank without work runs the same collectives.

    like: filler columns (trailing shapes by name). The filler is a masked token without sampling mask and routes.
    share_prefixes: mark a prompt that equals the previous sequence's prompt, so that it is computed once.

    Raises `ValueError` for an empty prompt, fields with different lengths or presence, and non-finite weights or
    advantages.
    """
    for index, s in enumerate(sequences):
        if problem := _problem(s, sequences[0]):
            raise ValueError(f"sequence {index}: {problem}")
    if not sequences:
        return _filler({"rollout_logprob": (), **(like or {})})
    places = _Places.from_sequences(sequences)
    loss_weight = places.repeat([s.loss_weight for s in sequences])
    _expect_finite("loss_weight", loss_weight, places)
    carries_loss = loss_weight != 0
    token_ids = np.concatenate([part for s in sequences for part in (s.prompt_ids, s.response_ids)])
    targets = np.concatenate([s.response_ids for s in sequences])[places.learned]
    batch: dict[str, torch.Tensor] = {
        "token_ids": torch.from_numpy(token_ids.astype(np.int64)),
        "position_ids": torch.from_numpy(np.arange(places.total) - np.repeat(places.ends - places.sizes, places.sizes)),
        "cu_seqlens": torch.tensor([0, *places.ends.tolist()], dtype=torch.int32),
        "target_ids": places.at_rows(np.where(carries_loss, targets, 0), np.int64),
        "mask": places.at_rows(carries_loss, np.bool_),
        "loss_weight": places.at_rows(loss_weight, np.float32),
    }
    if sequences[0].advantage is not None:
        temperature = np.repeat(np.array([s.temperature for s in sequences], dtype=np.float32), places.sizes)
        advantage = _advantages(sequences, places)
        _expect_finite("advantage", advantage, places)
        batch["advantage"] = places.at_rows(advantage, np.float32)
        batch["temperature"] = torch.from_numpy(temperature)
    columns = {
        column.name: _packed(column, sequences, places, carries_loss)
        for column in COLUMNS
        if column.name in sequences[0].columns
    }
    if share_prefixes:
        batch["shared_prefix"] = torch.tensor(_shared_prefixes(sequences), dtype=torch.int32)
    return TokenBatch.from_columns(columns, **batch)


@dataclass(frozen=True, slots=True)
class _Places:
    """Locates sequence tokens in the packed batch.

    Example: prompts of 2 and 1 tokens with responses of 2 and 1 give the batch [p p r r | p r], total 6. Response
    tokens are at rows 2, 3 and 5; the rows before them, [1, 2, 4], predict them.
    """

    prompts: np.ndarray  # [B], prompt tokens
    sizes: np.ndarray  # [B], prompt and response
    ends: np.ndarray  # [B]
    learned_sizes: np.ndarray  # [B]
    learned: np.ndarray | slice  # selects the learned tokens from all response tokens, end to end
    rows: np.ndarray  # [sum of learned_sizes], row that predicts each learned token

    @classmethod
    def from_sequences(cls, sequences: Sequence[TokenSequence]) -> _Places:
        prompts = np.array([len(s.prompt_ids) for s in sequences])
        responses = np.array([len(s.response_ids) for s in sequences])
        ends = np.cumsum(prompts + responses)
        # The row before response token j of a sequence predicts it: end - S + j - 1.
        first = ends - responses - 1
        rows = np.repeat(first - (np.cumsum(responses) - responses), responses) + np.arange(responses.sum())
        learned: np.ndarray | slice = slice(None)
        if any(s.sampled is not None for s in sequences):
            sampled = [np.ones(len(s.response_ids), np.bool_) if s.sampled is None else s.sampled for s in sequences]
            learned = np.concatenate(sampled)
        learned_sizes = np.array([s.learned for s in sequences])
        return cls(prompts, prompts + responses, ends, learned_sizes, learned, rows[learned])

    @property
    def total(self) -> int:
        return int(self.ends[-1])

    def repeat(self, values: list[Any]) -> np.ndarray:
        """Repeat one value per sequence: [sum of learned_sizes] fp32."""
        return np.repeat(np.array(values, dtype=np.float32), self.learned_sizes)

    def at_rows(self, values: np.ndarray, dtype: Any, fill: float = 0) -> torch.Tensor:
        """Put the values [sum of learned_sizes, ...] at the rows that predict their tokens, `fill` at all others."""
        out = np.full((self.total, *values.shape[1:]), fill, dtype=dtype)
        out[self.rows] = values
        return torch.from_numpy(out)

    def end_to_end(self, values: list[np.ndarray], dtype: Any, fill: float) -> torch.Tensor:
        """Compute `at_rows` with one copy if all response tokens are learned; top-K lists have most of the bytes."""
        gaps = self.prompts - (np.arange(len(self.sizes)) == 0)  # rows between two responses
        filling = np.full((max(int(gaps.max()), 1), *values[0].shape[1:]), fill, dtype=dtype)
        pieces = [piece for gap, value in zip(gaps, values, strict=True) for piece in (filling[:gap], value)]
        return torch.from_numpy(np.concatenate([*pieces, filling[:1]], dtype=dtype))


def _packed(
    column: Column, sequences: Sequence[TokenSequence], places: _Places, carries_loss: np.ndarray
) -> torch.Tensor:
    """Pack a column of all sequences. Targets without loss lose their sampling masks and get count 0."""
    values = [s.columns[column.name] for s in sequences]
    if column.rows == "read":
        # Sampling does not read a response's last token. The trainer computes a value there that nothing depends on.
        out = np.empty((places.total, *values[0].shape[1:]), dtype=column.packed)
        out[places.ends - 1] = column.fill
        for end, size, value in zip(places.ends, places.sizes, values, strict=True):
            out[end - size : end - 1] = value
        return torch.from_numpy(out)
    if column.rows == "listed":
        counts = np.concatenate([s.columns[column.counts] for s in sequences])
        return torch.from_numpy(np.concatenate(values)[np.repeat(carries_loss, counts)].astype(column.packed))
    if column.shape and isinstance(places.learned, slice):
        return places.end_to_end(values, column.packed, column.fill)
    flat_values = np.concatenate(values)
    if any(column.name == other.counts for other in COLUMNS):
        flat_values = np.where(carries_loss, flat_values, 0)
    return places.at_rows(flat_values, column.packed, column.fill)


def _advantages(sequences: Sequence[TokenSequence], places: _Places) -> np.ndarray:
    if any(isinstance(s.advantage, np.ndarray) for s in sequences):
        return np.concatenate([np.broadcast_to(s.advantage, s.learned) for s in sequences])  # type: ignore[arg-type]
    return places.repeat([s.advantage for s in sequences])


def _expect_finite(name: str, values: np.ndarray, places: _Places) -> None:
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        sequence = np.repeat(np.arange(len(places.sizes)), places.learned_sizes)[wrong[0]]
        raise ValueError(
            f"sequence {sequence}: {name} = {values[wrong[0]]}: not finite, which would make the gradient of the whole "
            "batch not finite"
        )


def _shared_prefixes(sequences: Sequence[TokenSequence]) -> list[int]:
    """Return for each sequence how many prompt tokens it shares with the previous sequence: all or none."""
    shared = [0]
    for previous_ids, prompt_ids in itertools.pairwise(s.prompt_ids for s in sequences):
        shared.append(len(prompt_ids) if prompt_ids is previous_ids or np.array_equal(prompt_ids, previous_ids) else 0)
    return shared


def _filler(like: Sizes) -> TokenBatch:
    zeros = torch.zeros(1)
    return TokenBatch.from_columns(
        {
            c.name: torch.full((int(c.rows != "listed"), *like[c.name]), c.fill, dtype=getattr(torch, c.packed))
            for c in COLUMNS
            if c.packed and c.name in like and c.asked_by not in ("sampling_mask", "routed_experts")
        },
        token_ids=zeros.long(),
        position_ids=zeros.long(),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        target_ids=zeros.long(),
        mask=zeros.bool(),
        loss_weight=zeros.clone(),
        advantage=zeros.clone(),
        temperature=torch.ones(1),
    )


def _problem(s: TokenSequence, first: TokenSequence) -> str:
    """Return why a sequence cannot be packed with the first, or an empty text."""
    if s.sampled is not None and s.sampled.shape != s.response_ids.shape:
        return f"{len(s.sampled)} marks of sampled tokens for {len(s.response_ids)} response tokens"
    if len(s.prompt_ids) == 0:
        return "empty prompt: nothing predicts the first response token"
    if differing := s.columns.keys() ^ first.columns.keys():
        return f"{', '.join(sorted(differing))} must be present in all sequences, as in sequence 0, or in none"
    if (s.advantage is None) != ("rollout_logprob" not in s.columns):
        return "a rollout needs an advantage and one log-prob per sampled token"
    shapes = expected_shapes(s.columns, s.learned, len(s) - 1, first.columns)
    for name, array in s.columns.items():
        if name not in shapes:
            return f"{name} is no column of types.COLUMNS"
        if array.shape != shapes[name]:
            return f"{name} is {list(array.shape)}, expected {list(shapes[name])}"
    return ""
