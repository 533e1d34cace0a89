"""Packs groups with all their tokens for the page, up to a size limit, and makes the excerpts of the table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import numpy as np

from dppo_megatron.bank import BankEntry, BankError, is_retired
from dppo_megatron.common.tensors import packed
from dppo_megatron.doctor.tokenizer_file import TokenizerFile
from dppo_megatron.types import POLICY, RolloutGroup

from .source import Source
from .trained import VALUES, TrainedTokens

TOKEN_BYTES, TOKEN_SAMPLES = 48 << 20, 20_000  # limits for the groups of the page: bytes before compression, samples
_SEED = 0
_LARGEST_ID = 1 << 22  # upper limit of token ids with a text
_USER = re.compile(r"<\|im_start\|>user|<\|start_header_id\|>user<\|end_header_id\|>")
EXCERPT = 160  # characters of a prompt or response in the table
RETIRED = "kept only as a row: checkpoint.keep_rollouts retired the tokens"


class ShownTokens:
    """Collects the token ids that the page shows."""

    def __init__(self) -> None:
        self._marks = np.zeros(_LARGEST_ID, bool)

    def add(self, ids: np.ndarray) -> None:
        self._marks[ids[(ids >= 0) & (ids < _LARGEST_ID)]] = True

    def texts(self, vocabulary: TokenizerFile | None) -> dict[int, str]:
        """Return id -> text of each shown token. The result is empty without a tokenizer."""
        if vocabulary is None:
            return {}
        ids = [token for token in np.flatnonzero(self._marks).tolist() if token < vocabulary.size]
        return dict(zip(ids, vocabulary.texts(ids), strict=True))


def chosen_groups(source: Source, entries: Sequence[BankEntry], trained: TrainedTokens) -> list[int]:
    """Choose the groups shown with their tokens; groups with tokens stored by the trainer take precedence."""
    sizes = np.array([(_bytes(entry), entry.num_samples) for entry in entries], np.int64).reshape(-1, 2)
    retired = {s for s in {entry.segment for entry in entries} if is_retired(source.bank, s)}
    source.missing |= {number: RETIRED for number, entry in enumerate(entries) if entry.segment in retired}
    if source.missing:
        source.notes.append(f"{len(source.missing):,} groups are {RETIRED}.")
    drawn = [n for n in np.random.default_rng(_SEED).permutation(len(entries)).tolist() if n not in source.missing]
    order = np.array(sorted(drawn, key=lambda number: entries[number].position not in trained.positions), int)
    within = (np.cumsum(sizes[order], axis=0) <= (TOKEN_BYTES, TOKEN_SAMPLES)).all(axis=1)
    if within.all():
        return sorted(order.tolist())
    count = max(1, int(within.sum()))
    chosen = np.sort(order[:count]).tolist()
    limits = f"the page has the tokens of {count:,} of {len(entries):,} groups, drawn at random"
    source.missing |= dict.fromkeys(order[count:].tolist(), f"left out of this file: {limits}")
    source.notes.append(
        f"Tokens of {len(chosen):,} of {len(entries):,} groups are in this file, drawn at random (seed {_SEED}); "
        "their rows are marked ●."
    )
    return chosen


def _bytes(entry: BankEntry) -> int:
    return int(4 * entry.response_lengths.sum() + (8 + 8 * entry.topk) * entry.sampled.sum())


def read_groups(
    source: Source, entries: Sequence[BankEntry], chosen: Sequence[int]
) -> Iterator[tuple[int, RolloutGroup]]:
    """Yield (number, group) of each chosen group that can be read. `source.missing` explains the other groups."""
    for number in chosen:
        try:
            yield number, source.reader.read(entries[number], parts=("core", "topk", "mask"))
        except BankError as error:
            source.lose(error)
            source.missing[number] = f"not readable: {error}"


def excerpts(group: RolloutGroup, vocabulary: TokenizerFile | None) -> list[str]:
    """Return the beginnings of the prompt and of every response, as text or, without a tokenizer, as ids."""
    responses = (r.token_ids[: EXCERPT // 2].tolist() for r in group.rollouts)
    decode = vocabulary.decode if vocabulary else lambda ids: " ".join(map(str, ids))
    most = vocabulary.size if vocabulary else _LARGEST_ID
    return [excerpt(group.prompt.text), *(excerpt(decode([i for i in ids if 0 <= i < most])) for ids in responses)]


def excerpt(text: str) -> str:
    """Return the beginning of the text, or of its last user message, in one line."""
    return " ".join(_USER.split(text)[-1][: 4 * EXCERPT].split())[:EXCERPT]


def packed_group(group: RolloutGroup, trained: TrainedTokens, used: ShownTokens) -> bytes:
    """Pack the samples end to end. spans [J, 3] are as in the bank. counts [n, 3] are tokens, sampled tokens, spans.

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
        "logprob": np.concatenate([r.rollout_logprob for r in rollouts]),
        "versions": np.concatenate([r.versions for r in rollouts]),
    }
    used.add(arrays["ids"])
    if rollouts[0].topk_ids is not None:
        arrays["topk_ids"] = np.concatenate([r.topk_ids for r in rollouts])
        arrays["topk_logprob"] = np.concatenate([r.rollout_topk_logprob for r in rollouts])
        used.add(arrays["topk_ids"].reshape(-1))
    if rollouts[0].teacher_logprob is not None:
        arrays["teacher_logprob"] = np.concatenate([r.teacher_logprob for r in rollouts])
    if rollouts[0].sampling_mask_counts is not None:
        arrays["kept"] = np.concatenate([r.sampling_mask_counts for r in rollouts])
    if group.prompt.position in trained.positions:
        of_samples = [trained.of(group.prompt.position, i, len(r.versions)) for i, r in enumerate(rollouts)]
        arrays |= {f"trainer_{name}": part for name, part in zip(VALUES, np.concatenate(of_samples, 1), strict=True)}
    of = {
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "temperature": group.temperature,
        "finish": [r.finish_reason for r in rollouts],
        "trajectory": [i if r.trajectory is None else r.trajectory for i, r in enumerate(rollouts)],
        "turn_rewards": None if group.turn_rewards is None else [rewards.tolist() for rewards in group.turn_rewards],
    }
    return packed(arrays, {"of": json.dumps(of)})  # ASCII, since a text may have characters that UTF-8 cannot encode
