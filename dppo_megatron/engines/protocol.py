"""Define the protocol of a rollout engine, which is the same for every kind of server.

Requests and replies contain token ids, never text. An engine samples groups, scores sequences and replaces its weights,
but it does not compute rewards or train. Every call has a timeout and raises `EngineTimeout`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.types import Column, Rollout
from dppo_megatron.weights.broadcast_plan import WeightGroupPlan
from dppo_megatron.weights.fingerprint import Fingerprint

from .trace import Trace

UpdateMode = Literal["keep", "wait", "abort"]
"""What happens to running requests when weights change: keep = they continue under the new weights (their earlier
tokens keep the old version), wait = they finish first, abort = they end now with the tokens they have."""


class EngineError(ExpectedError, RuntimeError):
    """An engine failed at an operation. The message names the engine and the operation."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached, closed the connection, or died."""


class EngineTimeout(EngineError):
    """The engine did not answer in time."""


class EngineRefused(EngineError):
    """The engine rejected the request as invalid. A retry would also be rejected."""


class EngineIncompatible(EngineError):
    """The engine's settings disagree with the run's; the message lists every disagreement with its remedy."""


class InvalidSample(EngineError):
    """The engine answered, but the samples cannot belong to the request. They must never be used for training."""


def check_ids(token_ids: np.ndarray, vocab_size: int) -> None:
    """Raise ValueError if an id is outside the vocabulary: it has no embedding, and ends the engine."""
    for place in _foreign(token_ids, vocab_size):
        raise ValueError(f"token id {token_ids[place]} is outside the vocabulary of {vocab_size}")


def _foreign(token_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    return np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Requests one group: `n` samples of one prompt.

    `seeds` has the seed of each sample's random stream. The same seed, prompt and weights give the same tokens,
    regardless of the engine's other requests. Sampling ends at the first of `stop_token_ids` (kept as the last token)
    or after `max_tokens`; the engine adds no stop tokens of its own. Temperature 0 is greedy; the log-probs then depend
    on the kind of engine.
    """

    request_id: str  # unique among running requests
    token_ids: np.ndarray  # [P] int32
    n: int
    seeds: tuple[int, ...]  # [n], 0 <= seed < 2**63
    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    topk: int = 0  # K most likely tokens per position; 0 = none
    routed_experts: bool = False  # return the experts that each token was routed to
    top_p: float = 1.0  # below 1 without `sampling_mask` the engine chooses whether log-probs are over the mask
    top_k: int = 0  # sample only from the `top_k` most likely tokens; 0 = all
    min_p: float = 0.0  # sample only from tokens with at least this share of the highest probability
    sampling_mask: bool = False  # return the tokens that top_p, top_k and min_p left at each position
    flags: tuple[str, ...] = ()  # values of `Column.asked_by` without a field here; requests their columns
    # Earlier samples of the prompt, int32, each after the last tokens of the prompt. An engine with engine.draft_tokens
    # may draft from them; the samples do not depend on them.
    drafts: tuple[np.ndarray, ...] = ()
    # Sample nothing: return the tokens of the prompt after the first as one sample, with log-probs at temperature 1, as
    # those of `Engine.score`, the top K and the policy version that computed them.
    scored: bool = False
    # Names that requests with a common prefix share, the widest first, e.g. group and conversation. The pool sends such
    # requests to one engine. The names are not sent.
    affinity: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.ascontiguousarray(self.token_ids, dtype=np.int32))
        object.__setattr__(self, "seeds", tuple(int(seed) for seed in self.seeds))
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))
        problems = [
            (not self.request_id, "request_id is empty"),
            (self.token_ids.ndim != 1 or not len(self.token_ids), "token_ids must be a non-empty vector"),
            (self.n < 1, f"n = {self.n} must be at least 1"),
            (len(self.seeds) != self.n, f"{len(self.seeds)} seeds for n = {self.n} samples"),
            (any(not 0 <= seed < 2**63 for seed in self.seeds), "seeds must lie in [0, 2**63)"),
            # Below 0.01 servers silently sample at 0.01, so the log-probs would belong to another temperature.
            (
                not (self.temperature == 0 or 0.01 <= self.temperature < float("inf")),
                f"temperature = {self.temperature} must be 0 (greedy) or at least 0.01",
            ),
            (not 0 < self.top_p <= 1, f"top_p = {self.top_p} must lie in (0, 1]"),
            (self.top_k < 0, f"top_k = {self.top_k} must not be negative"),
            (not 0 <= self.min_p <= 1, f"min_p = {self.min_p} must lie in [0, 1]"),
            (
                self.sampling_mask and not (self.top_k and self.temperature),
                "sampling_mask needs top_k, which bounds it, and temperature",
            ),
            (self.max_tokens < 1, f"max_tokens = {self.max_tokens} must be at least 1"),
            (self.topk < 0, f"topk = {self.topk} must not be negative"),
            (self.scored and (self.n > 1 or len(self.token_ids) < 2), "scored needs n = 1 and two tokens"),
        ]
        wrong = [message for is_wrong, message in problems if is_wrong]
        if wrong:
            raise ValueError(f"generate request {self.request_id!r}: {'; '.join(wrong)}")

    def within(self, vocab_size: int) -> GenerateRequest:
        """Return the request with its drafts up to their first id outside the vocabulary.

        Raises ValueError for such an id in the prompt.
        """
        check_ids(self.token_ids, vocab_size)
        ends = (min([len(draft), *_foreign(draft, vocab_size)]) for draft in self.drafts)
        return replace(self, drafts=tuple(draft[:end] for draft, end in zip(self.drafts, ends, strict=True)))

    def asks_for(self, column: Column) -> bool:
        """Return whether the samples of this request must have `column`."""
        return column.asked_by in ("", *self.flags) or bool(getattr(self, column.asked_by, False))


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Contains the state and limits that a server reports."""

    version: int  # policy version of the weights; -1 = the weights have no version of this run
    vocab_size: int
    max_model_len: int  # tokens of prompt and response together
    max_logprobs: int  # upper limit of K
    logprobs_mode: str
    dtype: str  # "float32" | "bfloat16" | "float16"
    model: str  # directory that the server was started from
    engine: str  # name and version of the server
    running: int  # running now: groups of all clients (vLLM), samples of this client (SGLang)
    routed_experts: bool = False  # it can return the experts that each token was routed to
    sampling_mask: bool = False  # it can return the tokens that top_p, top_k and min_p left at each position
    problems: tuple[str, ...] = ()  # reported settings that are unfit for rollouts, each with its remedy
    instance: str = ""  # identifies this instance of the server and changes with every restart; "" = unknown
    workers: int = 1  # processes that have its weights and receive new ones
    weight_group: str = ""  # name of the weight group that it can receive broadcasts of; empty = none
    updating_s: float | None = None  # seconds since the running weight update began; None = no update is running


class Engine(Protocol):
    """Calls one server. All methods may be called concurrently; the server serialises `load_weights` calls.

    Every method but `close` raises `EngineTimeout` and `EngineUnavailable`.
    """

    url: str
    counts: Counter[str]
    """Work since the caller cleared it, as far as the server reports it: `prompt_tokens`, and those of them in the
    prefix cache, `cached_tokens`; `sampled_tokens`; `draft_steps`, the steps of a sample with drafts; `drafted`, their
    tokens, and those of them that were sampled, `accepted`."""

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        """Return the `n` samples, in the order of `seeds`. Raises `InvalidSample` and `EngineRefused`."""

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return fp32 [S - 1]: the log-prob at temperature 1 of each token after the first, given the tokens before it.

        token_ids: [S] int32. The log-probs are computed without caches under the current weights. Raises
        `InvalidSample` and `EngineRefused`.
        """

    async def trace(self, token_ids: np.ndarray) -> tuple[Trace, np.ndarray]:
        """Return the intermediate values of the forward pass that `score` makes, and the scores.

        token_ids: [S] int32. The trace has the values of every layer and operator that can be hooked. Slow. Raises
        `InvalidSample` and `EngineRefused`.
        """

    async def load_weights(self, path: Path, version: int, mode: UpdateMode = "keep") -> float:
        """Serve the weights in the directory `path`, a model or a delta (`weights.delta`), as policy `version`.

        Returns the seconds without sampling. After `EngineRefused` the old weights are still served. After any other
        error the caller must load weights again before it generates.
        """

    async def join_weight_group(self, plan: WeightGroupPlan) -> None:
        """Make the workers leave earlier groups and join the trainer's group. Return when all have joined."""

    async def receive_weights(self, group: str, step: str, version: int, mode: UpdateMode = "keep") -> float:
        """Serve the weights that the trainer broadcasts in `step` of the joined group as policy `version`.

        Everything else is as in `load_weights`. After an error other than `EngineRefused` the engine is in no group.
        """

    async def weights_fingerprint(self) -> Fingerprint:
        """Return fingerprints that the engine computes from its current weights."""

    async def sleep(self) -> None:
        """Wait for running requests, then free the memory of weights and cache.

        The engine serves no requests until `wake` is called and weights are loaded.
        """

    async def wake(self) -> None:
        """Allocate the memory again. New weights must be loaded before sampling."""

    async def info(self) -> EngineInfo: ...

    async def health(self) -> None:
        """Return None if the engine can serve requests; raise `EngineError` otherwise."""

    async def check_compatible(self, config: Config, *, vocab_size: int | None = None) -> EngineInfo:
        """Raise `EngineIncompatible` with every setting of the server that disagrees with `config`.

        `vocab_size` is the vocabulary size of the trainer's model. With None it is not checked.
        """

    async def abort(self, request_id: str) -> None:
        """End a running request. Its `generate` returns the sampled tokens, with finish_reason "abort" where
        interrupted.
        """

    async def close(self) -> None:
        """Release connections. The server continues."""
