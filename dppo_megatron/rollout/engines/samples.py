"""Check a group's samples before their first use; engines send them end to end in flat arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dppo_megatron.types import Rollout, column_named, expected_shapes, split_columns

from .protocol import GenerateRequest, InvalidSample

FINISH_REASONS = ("stop", "length", "abort")
LOGPROB_TOLERANCE = 1e-4  # rounding error of a log-softmax; a value above it is not a log-prob


@dataclass(frozen=True, slots=True)
class GroupSamples:
    """Contains `n` samples end to end, with `S` response tokens in all and the columns that `COLUMNS` describes.

    Example with two samples: lengths [2, 1], token_ids [5, 6, 9], columns {"rollout_logprob": [-1.0, -0.5, -2.0],
    "versions": [3, 3, 4]}. The last value in each array belongs to the second sample. "read" columns have P - 1 more
    rows for each sample.
    """

    lengths: np.ndarray  # [n] int32
    finish_reasons: tuple[str, ...]  # [n]
    token_ids: np.ndarray  # [S] int32
    columns: dict[str, np.ndarray]
    counts: dict[str, int] = field(default_factory=dict)  # work for these samples, with the names in `Engine.counts`

    @classmethod
    def from_rollouts(cls, samples: Sequence[Rollout]) -> GroupSamples:
        """Concatenate the samples of a group. All samples must have the same columns."""
        column_dicts = [sample.columns for sample in samples]
        return cls(
            lengths=np.array([len(sample.token_ids) for sample in samples], dtype=np.int32),
            finish_reasons=tuple(sample.finish_reason for sample in samples),
            token_ids=np.concatenate([sample.token_ids for sample in samples]),
            columns={name: np.concatenate([columns[name] for columns in column_dicts]) for name in column_dicts[0]},
        )

    def rollouts(self, prompt_tokens: int) -> tuple[Rollout, ...]:
        """Return a `Rollout` for each sample of a prompt with `prompt_tokens` tokens; the arrays are views."""
        tokens = np.split(self.token_ids, np.cumsum(self.lengths)[:-1])
        columns = split_columns(self.columns, self.lengths, self.lengths + prompt_tokens - 1)
        return tuple(
            Rollout.from_columns(sample_columns, token_ids=ids, finish_reason=reason)
            for sample_columns, ids, reason in zip(columns, tokens, self.finish_reasons, strict=True)
        )

    def check(self, request: GenerateRequest, *, vocab_size: int, max_model_len: int) -> None:
        """Raise `InvalidSample` unless these samples can answer `request`. The error names the sample and the fault."""
        self._check_columns(request)
        check = _Check(request.request_id, self.lengths)
        if request.scored and not np.array_equal(self.token_ids, request.token_ids[1:]):
            raise InvalidSample(f"group {request.request_id}: the scored tokens differ from the ones that were sent")
        check.tokens((self.token_ids < 0) | (self.token_ids >= vocab_size), f"token id outside [0, {vocab_size})")
        _check_logprobs(check, self.columns)
        check.tokens(self.columns["versions"] < 0, "token carries no policy version")
        if not request.scored:
            self._check_ends(request, check, max_model_len)
        if request.sampling_mask:
            self._check_mask(check, vocab_size)
        if request.topk:
            _check_topk(check, self.token_ids, self.columns, vocab_size)
        if request.routed_experts:
            experts = np.sort(self.columns["routed_experts"], axis=2)
            if (experts[:, :, 1:] == experts[:, :, :-1]).any():
                raise InvalidSample(f"group {request.request_id}: a token is routed to the same expert twice")

    def _check_columns(self, request: GenerateRequest) -> None:
        group = f"group {request.request_id}"
        total = int(self.lengths.sum()) if self.lengths.ndim == 1 else -1
        read_rows = total + request.n * (len(request.token_ids) - 1)
        arrays = {"lengths": self.lengths, "token_ids": self.token_ids, **self.columns}
        shapes = expected_shapes(self.columns, total, read_rows, self.columns, K=request.topk)
        for name, shape in {"lengths": (request.n,), "token_ids": (total,), **shapes}.items():
            column, array = column_named(name), arrays.get(name)
            if column is not None and not request.asks_for(column):
                if array is not None:
                    raise InvalidSample(f"{group}: the engine returned {name}, which was not requested")
                continue
            if array is None or array.shape != shape:
                problem = "missing" if array is None else f"of shape {array.shape}"
                raise InvalidSample(f"{group}: {name} is {problem}, expected {shape}")
            if str(array.dtype) not in (dtypes := ("int32",) if column is None else column.dtypes):
                raise InvalidSample(f"{group}: {name} is {array.dtype}, expected {' or '.join(dtypes)}")
        if len(self.finish_reasons) != request.n:
            raise InvalidSample(f"{group}: {len(self.finish_reasons)} finish reasons for {request.n} samples")

    def _check_ends(self, request: GenerateRequest, check: _Check, max_model_len: int) -> None:
        reasons = np.asarray(self.finish_reasons)
        check.samples(~np.isin(reasons, FINISH_REASONS), f"finish reason is none of {FINISH_REASONS}")
        check.samples((self.lengths < 1) & (reasons != "abort"), "no token at all")
        check.samples(self.lengths > request.max_tokens, f"longer than max_tokens = {request.max_tokens}")
        full = (self.lengths == request.max_tokens) | (self.lengths + len(request.token_ids) == max_model_len)
        check.samples((reasons == "length") & ~full, "ended for its length before it reached a limit of tokens")

        is_stop = np.isin(self.token_ids, request.stop_token_ids)
        is_last = np.zeros(len(self.token_ids), dtype=bool)
        is_last[np.cumsum(self.lengths)[self.lengths > 0] - 1] = True
        stopped = np.repeat(reasons == "stop", self.lengths)
        check.tokens(is_stop & ~is_last, "more tokens follow a stop token")
        check.tokens(is_last & stopped & ~is_stop, "finish reason is stop but the last token is not a stop token")

    def _check_mask(self, check: _Check, vocab_size: int) -> None:
        ids, counts = self.columns["sampling_mask_ids"], self.columns["sampling_mask_counts"]
        check.tokens(counts < 1, "the sampling mask is empty")
        if not len(counts):
            return
        starts = np.cumsum(counts) - counts
        outside = np.logical_or.reduceat((ids < 0) | (ids >= vocab_size), starts)
        check.tokens(outside, f"sampling mask id outside [0, {vocab_size})")
        unordered = np.diff(ids, prepend=-1) <= 0
        unordered[starts] = False
        check.tokens(np.logical_or.reduceat(unordered, starts), "sampling mask ids are not ascending")
        in_mask = _in_mask(self.columns, self.token_ids[:, None], vocab_size)[:, 0]
        check.tokens(~in_mask, "the sampled token is not in the sampling mask")


def parse_version(label: str) -> int:
    """Return the policy version in a server's text label for the weights, or -1 if the label is not a number."""
    return int(label) if label.isdecimal() else -1


def absent_experts(prompt_tokens: int, layers: int, k: int) -> np.ndarray:
    """Return experts [P - 1, L, k] uint8, 0 to k - 1 at every position, for a sample aborted before it began.

    The tokens carry no loss, so any routing is valid.
    """
    return np.broadcast_to(np.arange(k, dtype=np.uint8), (prompt_tokens - 1, layers, k))


def check_scores(subject: str, logprobs: np.ndarray | None, expected: int) -> np.ndarray:
    """Return `logprobs` if they are `expected` valid log-probs. Raises `InvalidSample` otherwise."""
    if logprobs is None or logprobs.shape != (expected,):
        raise InvalidSample(f"{subject}: expected {expected} log-probs, got {logprobs}")
    if not (np.isfinite(logprobs).all() and (logprobs <= LOGPROB_TOLERANCE).all()):
        raise InvalidSample(f"{subject}: log-probs not finite or above 0: {logprobs}")
    return logprobs


def check_lists(name: str, token_ids: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
    """Raise `InvalidSample` unless log-probs and top-K lists of one sample fit a distribution, over any vocabulary.

    Errors name the group `name`.
    """
    check = _Check(name, np.array([len(token_ids)]))
    _check_logprobs(check, columns)
    _check_topk(check, token_ids, columns, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class _Check:
    """Raises an error that names the first wrong token or sample in an array of flags."""

    request_id: str
    lengths: np.ndarray

    def tokens(self, wrong: np.ndarray, message: str) -> None:
        if wrong.any():
            token = int(np.argmax(wrong))
            ends = np.cumsum(self.lengths)
            sample = int(np.searchsorted(ends, token, side="right"))
            position = token - int(ends[sample] - self.lengths[sample])
            raise InvalidSample(
                f"group {self.request_id}, sample {sample}, token {position}: {message} "
                f"({int(wrong.sum())} of {len(wrong)} tokens)"
            )

    def samples(self, wrong: np.ndarray, message: str) -> None:
        if wrong.any():
            raise InvalidSample(
                f"group {self.request_id}, sample {int(np.argmax(wrong))}: {message} "
                f"({int(wrong.sum())} of {len(wrong)} samples)"
            )


def _check_logprobs(check: _Check, columns: Mapping[str, np.ndarray]) -> None:
    logprob = columns["rollout_logprob"]
    check.tokens(~np.isfinite(logprob), "log-prob is missing or not finite")
    check.tokens(logprob > LOGPROB_TOLERANCE, "log-prob above 0")


def _check_topk(check: _Check, token_ids: np.ndarray, columns: Mapping[str, np.ndarray], vocab_size: int) -> None:
    ids, logprobs = columns["topk_ids"], columns["rollout_topk_logprob"]
    valid = np.ones(ids.shape, dtype=bool)
    if (counts := columns.get("sampling_mask_counts")) is not None:  # other tokens have probability 0
        places = np.arange(ids.shape[1])
        valid = places < counts[:, None]
        check.tokens(((ids >= 0) != valid).any(1), "the top K are more or fewer than the tokens of its mask")
        ids, logprobs = np.where(valid, ids, vocab_size + places), np.where(valid, logprobs, np.float32(-1e30))
        check.tokens((valid & ~_in_mask(columns, ids, vocab_size)).any(1), "a top-K id is not in the sampling mask")
    check.tokens(np.any(valid & ((ids < 0) | (ids >= vocab_size)), axis=1), f"top-K id outside [0, {vocab_size})")
    check.tokens(~np.isfinite(logprobs).all(1), "top-K log-prob is missing or not finite")
    check.tokens(np.any(np.diff(logprobs, axis=1) > LOGPROB_TOLERANCE, axis=1), "top-K log-probs are not in order")
    check.tokens(np.exp(logprobs).sum(1) > 1 + 1e-3, "top-K probabilities sum to more than 1")
    check.tokens((np.diff(np.sort(ids, axis=1), axis=1) == 0).any(1), "an id is in the top K twice")
    sampled = ids == token_ids[:, None]
    differs = sampled & (np.abs(logprobs - columns["rollout_logprob"][:, None]) > LOGPROB_TOLERANCE)
    check.tokens(differs.any(1), "top-K log-prob of the sampled token differs from its own")


def _in_mask(columns: Mapping[str, np.ndarray], ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return [S, n] bool: whether each of ids [S, n] is in the sampling mask at that position."""
    tokens = np.arange(len(ids), dtype=np.int64)
    width = vocab_size + ids.shape[1]
    # Each (position, id) pair becomes an integer. Mask integers ascend, so a single search finds all ids.
    mask_keys = np.repeat(tokens, columns["sampling_mask_counts"]) * width + columns["sampling_mask_ids"]
    keys = tokens[:, None] * width + ids
    return mask_keys[np.searchsorted(mask_keys, keys).clip(max=len(mask_keys) - 1)] == keys
