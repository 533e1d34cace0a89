"""Packs groups with all tokens for the page, up to a size limit, and makes the table's excerpts.

Tokens come with the values that the trainer stored in files (`tracking.token_sequences`, `train/trainer/token_log.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from dppo_megatron.bank import BankEntry, BankError, retired_segments
from dppo_megatron.common.tensors import packed
from dppo_megatron.data.tokenizer_file import TokenizerFile
from dppo_megatron.run_dir import RunDir
from dppo_megatron.types import POLICY, RolloutGroup

from .source import Source

TOKEN_BYTES, TOKEN_SAMPLES = 48 << 20, 20_000  # limits for groups on the page: bytes before compression, samples
_SEED = 0
_LARGEST_ID = 1 << 22  # upper limit of token ids with a text
_USER = re.compile(r"<\|im_start\|>user|<\|start_header_id\|>user<\|end_header_id\|>")
EXCERPT = 160  # characters of a prompt or response in the table
VALUES = ("logprob", "entropy", "divergence", "masked")  # stored by the trainer
SHOWN = {  # name on the page -> rollout column
    "logprob": "rollout_logprob",
    "versions": "versions",
    "topk_ids": "topk_ids",
    "topk_logprob": "rollout_topk_logprob",
    "teacher_logprob": "teacher_logprob",
    "kept": "sampling_mask_counts",
}
RETIRED = "kept only as a row: checkpoint.keep_rollouts retired the tokens"


class TrainedTokens:
    """Contains the trainer's token values by prompt position and sample. Context-parallel ranks split a sequence."""

    def __init__(self, source: Source):
        self.positions: set[int] = set()
        self._places: dict[tuple[int, int], list[tuple[Path, slice]]] = {}
        self._masked: dict[tuple[int, int], tuple[int, int]] = {}  # (masked tokens, tokens)
        self._load = lru_cache(maxsize=8)(_values)  # groups are read in file order
        paths = sorted(RunDir(source.root).tokens.glob("step-*.safetensors")) if source.is_run else []
        for path in paths:
            try:
                self._add(path)
            except (OSError, ValueError, SafetensorError) as error:
                source.notes.append(f"{path}: not read: {error}")

    def masked_share(self, position: int, sample: int) -> float:
        masked, tokens = self._masked.get((position, sample), (0, 0))
        return masked / tokens if tokens else float("nan")

    def values(self, position: int, sample: int, size: int) -> np.ndarray:
        """Return VALUES of every sampled token, fp32 [4, size]. Values that were not stored are NaN."""
        token_values = np.full((len(VALUES), size), np.nan, np.float32)
        for path, part in self._places.get((position, sample), ()):
            index, values = self._load(path)
            slots = index[part]
            # Otherwise the values belong to another sample.
            if len(slots) == part.stop - part.start and slots.min() >= 0 and slots.max() < size:
                token_values[:, slots] = values[:, part]
        return token_values

    def _add(self, path: Path) -> None:
        with safe_open(path, "np") as file:
            names = ("position", "sample", "counts", "masked")
            positions, samples, counts, masked = map(file.get_tensor, names)
        ends = np.cumsum(counts)
        if len(counts) and (counts.min() < 1 or ends[-1] != len(masked)):
            raise ValueError(f"{len(masked)} values, but its counts add up to {ends[-1]}")
        for position, sample, end, count in zip(positions, samples, ends, counts, strict=True):
            key, part = (int(position), int(sample)), slice(int(end - count), int(end))
            self._places.setdefault(key, []).append((path, part))
            self.positions.add(key[0])
            totals = self._masked.get(key, (0, 0))
            self._masked[key] = totals[0] + int(masked[part].sum()), totals[1] + int(count)


def _values(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return (index [N], VALUES fp32 [4, N]). Both are empty if the file can no longer be read."""
    try:
        with safe_open(path, "np") as file:
            return file.get_tensor("index"), np.stack([file.get_tensor(name).astype(np.float32) for name in VALUES])
    except (OSError, ValueError, SafetensorError):
        return np.zeros(0, np.int32), np.zeros((len(VALUES), 0), np.float32)


class ShownTokens:
    """Collects the token ids that the page shows."""

    def __init__(self) -> None:
        self._marks = np.zeros(_LARGEST_ID, bool)

    def add(self, ids: np.ndarray) -> None:
        self._marks[ids[(ids >= 0) & (ids < _LARGEST_ID)]] = True

    def texts(self, vocabulary: TokenizerFile | None) -> dict[int, str]:
        """Return the text of each shown token, by id; empty without a tokenizer."""
        if vocabulary is None:
            return {}
        ids = [token for token in np.flatnonzero(self._marks).tolist() if token < vocabulary.size]
        return dict(zip(ids, vocabulary.texts(ids), strict=True))


def chosen_groups(source: Source, entries: Sequence[BankEntry], trained: TrainedTokens) -> list[int]:
    """Choose which groups are shown with tokens; groups with stored trainer values come first."""
    sizes = np.array([(_bytes(entry), entry.num_samples) for entry in entries], np.int64).reshape(-1, 2)
    retired = retired_segments(source.bank, {entry.segment for entry in entries})
    source.missing |= {number: RETIRED for number, entry in enumerate(entries) if entry.segment in retired}
    if source.missing:
        source.notes.append(f"{len(source.missing):,} groups are {RETIRED}.")
    candidates = [n for n in np.random.default_rng(_SEED).permutation(len(entries)).tolist() if n not in source.missing]
    order = np.array(sorted(candidates, key=lambda number: entries[number].position not in trained.positions), int)
    within = (np.cumsum(sizes[order], axis=0) <= (TOKEN_BYTES, TOKEN_SAMPLES)).all(axis=1)
    if within.all():
        return sorted(order.tolist())
    count = max(1, int(within.sum()))
    numbers = np.sort(order[:count]).tolist()
    limits = f"the page has the tokens of {count:,} of {len(entries):,} groups, drawn at random"
    source.missing |= dict.fromkeys(order[count:].tolist(), f"left out of this file: {limits}")
    source.notes.append(
        f"Tokens of {len(numbers):,} of {len(entries):,} groups are in this file, drawn at random (seed {_SEED}); "
        "their rows are marked ●."
    )
    return numbers


def _bytes(entry: BankEntry) -> int:
    return int(4 * entry.response_lengths.sum() + (8 + 8 * entry.topk) * entry.sampled.sum())


def read_groups(
    source: Source, entries: Sequence[BankEntry], numbers: Sequence[int]
) -> Iterator[tuple[int, RolloutGroup]]:
    """Yield (number, group) of each readable chosen group. `source.missing` explains the other groups."""
    for number in numbers:
        try:
            yield number, source.reader.read(entries[number], parts=("core", "topk", "mask"))
        except BankError as error:
            source.lost.append(str(error))
            source.missing[number] = f"not readable: {error}"


def response_texts(group: RolloutGroup, vocabulary: TokenizerFile | None) -> list[str]:
    """Return the beginning of every response, as text or, without a tokenizer, as ids."""
    responses = (r.token_ids[: EXCERPT // 2].tolist() for r in group.rollouts)
    decode = vocabulary.decode if vocabulary else lambda ids: " ".join(map(str, ids))
    id_limit = vocabulary.size if vocabulary else _LARGEST_ID
    return [decode([i for i in ids if 0 <= i < id_limit]) for ids in responses]


def excerpts(prompt: str, responses: Iterable[str]) -> list[str]:
    """Return one-line excerpts: the beginning of the prompt, or of its last user message, then of every response.

    Multi-turn evaluation answers begin with the prompt, which is left out.
    """
    texts = [_USER.split(prompt)[-1], *(response.removeprefix(prompt) for response in responses)]
    return [" ".join(text[: 4 * EXCERPT].split())[:EXCERPT] for text in texts]


def packed_group(group: RolloutGroup, trained: TrainedTokens, shown: ShownTokens) -> bytes:
    """Pack a group's samples end to end.

    spans [J, 3] are as in the bank. counts [n, 3] are the numbers of tokens, sampled tokens and spans of each sample.
    Example: samples with the ids [5, 6] and [7, 8, 9], all sampled, have ids [5, 6, 7, 8, 9] and counts [[2, 2, 1], [3,
    3, 1]].
    """
    rollouts = group.rollouts
    spans = [np.array([[POLICY, len(r.token_ids), 0]]) if r.spans is None else r.spans for r in rollouts]
    counts = [(len(r.token_ids), len(r.versions), len(s)) for r, s in zip(rollouts, spans, strict=True)]
    arrays = {
        "counts": np.array(counts, np.int32),
        "spans": np.concatenate(spans).astype(np.int32),
        "ids": np.concatenate([r.token_ids for r in rollouts]),
    }
    present = {name: column for name, column in SHOWN.items() if rollouts[0].column(column) is not None}
    arrays |= {name: np.concatenate([r.column(column) for r in rollouts]) for name, column in present.items()}
    for name in {"ids", "topk_ids"} & arrays.keys():
        shown.add(arrays[name].reshape(-1))
    if group.prompt.position in trained.positions:
        sample_values = [trained.values(group.prompt.position, i, len(r.versions)) for i, r in enumerate(rollouts)]
        arrays |= {f"trainer_{name}": part for name, part in zip(VALUES, np.concatenate(sample_values, 1), strict=True)}
    meta = {
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "temperature": group.temperature,
        "finish": [r.finish_reason for r in rollouts],
        "trajectory": [i if r.trajectory is None else r.trajectory for i, r in enumerate(rollouts)],
        "turn_rewards": None if group.turn_rewards is None else [rewards.tolist() for rewards in group.turn_rewards],
    }
    return packed(arrays, {"of": json.dumps(meta)})  # ASCII, because UTF-8 cannot encode some characters of texts
