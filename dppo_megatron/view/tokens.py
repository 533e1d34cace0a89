"""Groups with all their tokens, packed: of every group a safetensors file, as many of them as the page may hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from dppo_megatron.bank import BankEntry, BankError
from dppo_megatron.common.tensors import packed
from dppo_megatron.doctor.vocabulary import Vocabulary
from dppo_megatron.types import POLICY, RolloutGroup

from .source import Source
from .trained import VALUES, TrainedTokens

# Groups are drawn until they are so many: bytes before compression, samples.
TOKEN_BYTES, TOKEN_SAMPLES = 48 << 20, 20_000
_SEED = 0
_LARGEST_ID = 1 << 22  # of a token that has a text


class Used:
    """The token ids that the page shows."""

    def __init__(self) -> None:
        self._marks = np.zeros(_LARGEST_ID, bool)

    def add(self, ids: np.ndarray) -> None:
        self._marks[ids[(ids >= 0) & (ids < _LARGEST_ID)]] = True

    def texts(self, vocabulary: Vocabulary | None) -> dict[int, str]:
        """Id -> text of the token; empty without a tokenizer."""
        if vocabulary is None:
            return {}
        ids = [token for token in np.flatnonzero(self._marks).tolist() if token < vocabulary.size]
        return dict(zip(ids, vocabulary.texts(ids), strict=True))


def chosen_groups(source: Source, entries: Sequence[BankEntry], trained: TrainedTokens) -> list[int]:
    """Numbers of the groups whose tokens the page holds, ascending: those of which the trainer stored some first."""
    sizes = np.array([(_bytes(entry), entry.num_samples) for entry in entries], np.int64).reshape(-1, 2)
    order = np.random.default_rng(_SEED).permutation(len(entries))
    stored = trained.positions
    order = np.array(sorted(order, key=lambda number: entries[number].position not in stored), int)
    within = (np.cumsum(sizes[order], axis=0) <= (TOKEN_BYTES, TOKEN_SAMPLES)).all(axis=1)
    if within.all():
        return list(range(len(entries)))
    chosen = np.sort(order[: max(1, int(within.sum()))]).tolist()
    source.notes.append(
        f"Tokens of {len(chosen):,} of {len(entries):,} groups are in this file, drawn at random (seed {_SEED}); "
        "their rows are marked ●."
    )
    return chosen


def _bytes(entry: BankEntry) -> int:
    return int(4 * entry.response_lengths.sum() + (8 + 8 * entry.topk) * entry.sampled.sum())


def packed_groups(
    source: Source, entries: Sequence[BankEntry], chosen: Sequence[int], trained: TrainedTokens, used: Used
) -> Iterator[tuple[int, bytes]]:
    """(number, safetensors) of the chosen groups that can be read."""
    for number in chosen:
        try:
            group = source.reader.read(entries[number], parts=("core", "topk", "mask"))
        except BankError as error:
            source.lose(error)
            continue
        yield number, _packed(group, trained, used)


def _packed(group: RolloutGroup, trained: TrainedTokens, used: Used) -> bytes:
    """Samples end to end. `spans` [J, 3] as in the bank; `counts` [n, 3]: tokens, sampled tokens, spans of each."""
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
    if rollouts[0].kept_counts is not None:
        arrays["kept"] = np.concatenate([r.kept_counts for r in rollouts])
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
    return packed(arrays, {"of": json.dumps(of)})  # ASCII: a text may hold what UTF-8 has not
