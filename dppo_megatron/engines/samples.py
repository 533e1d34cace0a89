"""The samples of one group end to end in flat arrays: as engines send them, checked before anything uses them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dppo_megatron.types import Rollout

from .protocol import GenerateRequest, InvalidSample

FINISH_REASONS = ("stop", "length", "abort")
LOGPROB_TOLERANCE = 1e-4  # rounding of a log-softmax; a log-prob above it is no log-prob


@dataclass(frozen=True, slots=True)
class GroupSamples:
    """`n` samples, `S` response tokens in all, the `K` most likely tokens of a position."""

    lengths: np.ndarray  # [n] int32
    finish_reasons: tuple[str, ...]  # [n]
    token_ids: np.ndarray  # [S] int32
    rollout_logprob: np.ndarray  # [S] fp32
    versions: np.ndarray  # [S] int32
    topk_ids: np.ndarray | None = None  # [S, K] int32
    rollout_topk_logprob: np.ndarray | None = None  # [S, K] fp32
    # [n (P - 1) + S, L, k] uint8 | uint16: P + R - 1 rows of every sample
    routed_experts: np.ndarray | None = None
    kept_ids: np.ndarray | None = None  # [sum of kept_counts] int32, ascending at every position
    kept_counts: np.ndarray | None = None  # [S] int32

    def rollouts(self, prompt_tokens: int) -> tuple[Rollout, ...]:
        """One `Rollout` per sample of a prompt of `prompt_tokens`; the arrays are views."""
        ends = np.cumsum(self.lengths)
        routed_ends = np.cumsum(self.lengths + prompt_tokens - 1)
        out = []
        kept_ends = np.array([0]) if self.kept_counts is None else np.append(0, np.cumsum(self.kept_counts))
        for length, end, routed_end, reason in zip(self.lengths, ends, routed_ends, self.finish_reasons, strict=True):
            rows = slice(int(end - length), int(end))
            routed = slice(int(routed_end - length) - prompt_tokens + 1, int(routed_end))
            out.append(
                Rollout(
                    token_ids=self.token_ids[rows],
                    rollout_logprob=self.rollout_logprob[rows],
                    versions=self.versions[rows],
                    finish_reason=reason,
                    topk_ids=None if self.topk_ids is None else self.topk_ids[rows],
                    rollout_topk_logprob=None if self.rollout_topk_logprob is None else self.rollout_topk_logprob[rows],
                    routed_experts=None if self.routed_experts is None else self.routed_experts[routed],
                    kept_ids=None
                    if self.kept_ids is None
                    else self.kept_ids[slice(*kept_ends[[rows.start, rows.stop]])],
                    kept_counts=None if self.kept_counts is None else self.kept_counts[rows],
                )
            )
        return tuple(out)

    def check(self, request: GenerateRequest, *, vocab_size: int, max_model_len: int) -> None:
        """Raises `InvalidSample`, naming the sample and what is wrong, unless these can answer `request`."""
        self._check_shapes(request)
        check = _Check(request.request_id, self.lengths)
        check.tokens((self.token_ids < 0) | (self.token_ids >= vocab_size), f"token id outside [0, {vocab_size})")
        check.tokens(~np.isfinite(self.rollout_logprob), "log-prob is missing or not finite")
        check.tokens(self.rollout_logprob > LOGPROB_TOLERANCE, "log-prob above 0")
        check.tokens(self.versions < 0, "token carries no policy version")
        self._check_ends(request, check, max_model_len)
        if request.kept:
            self._check_kept(check, vocab_size)
        if request.topk:
            self._check_topk(check, vocab_size)
        if request.routed_experts:
            self._check_experts(request)

    def _check_shapes(self, request: GenerateRequest) -> None:
        n, k = request.n, request.topk
        total = int(self.lengths.sum()) if self.lengths.ndim == 1 else -1
        expected = {
            "lengths": (self.lengths, (n,)),
            "token_ids": (self.token_ids, (total,)),
            "rollout_logprob": (self.rollout_logprob, (total,)),
            "versions": (self.versions, (total,)),
        }
        if k:
            expected |= {
                "topk_ids": (self.topk_ids, (total, k)),
                "rollout_topk_logprob": (self.rollout_topk_logprob, (total, k)),
            }
        for name, (array, shape) in expected.items():
            if array is None or array.shape != shape:
                found = "missing" if array is None else f"of shape {array.shape}"
                raise InvalidSample(f"group {request.request_id}: {name} is {found}, expected {shape}")
        if len(self.finish_reasons) != n:
            raise InvalidSample(
                f"group {request.request_id}: {len(self.finish_reasons)} finish reasons for {n} samples"
            )

    def _check_ends(self, request: GenerateRequest, check: _Check, max_model_len: int) -> None:
        reasons = np.asarray(self.finish_reasons)
        check.samples(~np.isin(reasons, FINISH_REASONS), f"finish reason is none of {FINISH_REASONS}")
        check.samples((self.lengths < 1) & (reasons != "abort"), "no token at all")
        check.samples(self.lengths > request.max_tokens, f"longer than max_tokens = {request.max_tokens}")
        full = (self.lengths == request.max_tokens) | (self.lengths + len(request.token_ids) == max_model_len)
        check.samples((reasons == "length") & ~full, "ended for its length before it was reached")

        is_stop = np.isin(self.token_ids, request.stop_token_ids)
        is_last = np.zeros(len(self.token_ids), dtype=bool)
        is_last[np.cumsum(self.lengths)[self.lengths > 0] - 1] = True
        stopped = np.repeat(reasons == "stop", self.lengths)
        check.tokens(is_stop & ~is_last, "goes on after a stop token")
        check.tokens(is_last & stopped & ~is_stop, "finish reason is stop but the last token is no stop token")

    def _check_topk(self, check: _Check, vocab_size: int) -> None:
        ids, logprobs = self.topk_ids, self.rollout_topk_logprob
        listed = np.ones(ids.shape, dtype=bool)
        if self.kept_counts is not None:  # what is missing at the end of a list has probability 0
            places = np.arange(ids.shape[1])
            listed = places < self.kept_counts[:, None]
            check.tokens(((ids >= 0) != listed).any(1), "the top K are more or fewer than the tokens that were left")
            ids, logprobs = np.where(listed, ids, vocab_size + places), np.where(listed, logprobs, np.float32(-1e30))
            check.tokens((listed & ~self._kept(ids, vocab_size)).any(1), "a top-K id is not among the tokens left")
        check.tokens((listed & ((ids < 0) | (ids >= vocab_size))).any(1), f"top-K id outside [0, {vocab_size})")
        check.tokens(~np.isfinite(logprobs).all(1), "top-K log-prob is missing or not finite")
        check.tokens((np.diff(logprobs, axis=1) > LOGPROB_TOLERANCE).any(1), "top-K log-probs are not in order")
        check.tokens(np.exp(logprobs).sum(1) > 1 + 1e-3, "top-K probabilities sum to more than 1")
        check.tokens((np.diff(np.sort(ids, axis=1), axis=1) == 0).any(1), "an id is in the top K twice")
        sampled = ids == self.token_ids[:, None]
        differs = sampled & (np.abs(logprobs - self.rollout_logprob[:, None]) > LOGPROB_TOLERANCE)
        check.tokens(differs.any(1), "top-K log-prob of the sampled token differs from its own")

    def _check_kept(self, check: _Check, vocab_size: int) -> None:
        ids, counts = self.kept_ids, self.kept_counts
        if ids is None or counts is None or counts.shape != self.token_ids.shape or ids.shape != (int(counts.sum()),):
            raise InvalidSample(
                f"group {check.request_id}: the kept ids of {len(self.token_ids)} tokens are incomplete"
            )
        check.tokens(counts < 1, "no token was left to draw from")
        if not len(counts):
            return
        starts = np.cumsum(counts) - counts
        check.tokens(
            np.logical_or.reduceat((ids < 0) | (ids >= vocab_size), starts), f"kept id outside [0, {vocab_size})"
        )
        again = np.diff(ids, prepend=-1) <= 0
        again[starts] = False
        check.tokens(np.logical_or.reduceat(again, starts), "kept ids are not ascending")
        drawn = self._kept(self.token_ids[:, None], vocab_size)[:, 0]
        check.tokens(~drawn, "the sampled token is not among those that were left to draw from")

    def _kept(self, ids: np.ndarray, vocab_size: int) -> np.ndarray:
        """[S, n] bool: whether each of ids [S, n] was left to draw from at its position."""
        tokens = np.arange(len(ids), dtype=np.int64)
        width = vocab_size + ids.shape[1]
        kept = np.repeat(tokens, self.kept_counts) * width + self.kept_ids  # ascending
        wanted = tokens[:, None] * width + ids
        return kept[np.searchsorted(kept, wanted).clip(max=len(kept) - 1)] == wanted

    def _check_experts(self, request: GenerateRequest) -> None:
        experts = self.routed_experts
        rows = len(self.token_ids) + request.n * (len(request.token_ids) - 1)
        if experts is None or experts.ndim != 3 or len(experts) != rows:
            found = "missing" if experts is None else f"of shape {experts.shape}"
            raise InvalidSample(f"group {request.request_id}: routed experts are {found}, expected {rows} rows")
        ordered = np.sort(experts, axis=2)
        if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
            raise InvalidSample(f"group {request.request_id}: a token is routed to the same expert twice")


def absent_experts(prompt_tokens: int, layers: int, k: int) -> np.ndarray:
    """[P - 1, L, k] uint8 for a sample aborted before it began: any routing will do where no token carries loss."""
    return np.broadcast_to(np.arange(k, dtype=np.uint8), (prompt_tokens - 1, layers, k))


def check_scores(what: str, logprobs: np.ndarray | None, expected: int) -> np.ndarray:
    """`logprobs`, which must be `expected` log-probs. Raises `InvalidSample`."""
    if logprobs is None or logprobs.shape != (expected,):
        raise InvalidSample(f"{what}: expected {expected} log-probs, got {logprobs}")
    if not (np.isfinite(logprobs).all() and (logprobs <= LOGPROB_TOLERANCE).all()):
        raise InvalidSample(f"{what}: log-probs not finite or above 0: {logprobs}")
    return logprobs


@dataclass(frozen=True, slots=True)
class _Check:
    """Turns a mask of wrong tokens or samples into an error that names the first of them."""

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
