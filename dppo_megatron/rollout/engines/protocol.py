"""Define the protocol of a rollout engine, the same for every kind of server.

Requests and replies contain token ids, never text. An engine samples groups, scores sequences and replaces weights, but
it does not compute rewards or train. Every call has a timeout and raises `EngineTimeout`.
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
"""How a weight update treats running requests:

keep: requests continue under the new weights; their earlier tokens keep the old version.
wait: requests finish first.
abort: requests end now with the tokens they have.
"""


class EngineError(ExpectedError, RuntimeError):
    """An engine failed at an operation. The message names the engine and the operation."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached, closed the connection, or died."""


class EngineTimeout(EngineError):
    """The engine did not answer in time."""


class EngineRefused(EngineError):
    """The engine rejected the request as invalid. A retry would also be rejected."""


class EngineIncompatible(EngineError):
    """The engine settings disagree with the run settings; the message lists every disagreement with a remedy."""


class InvalidSample(EngineError):
    """The engine answered, but the samples cannot belong to the request. They must never be used for training."""


def check_ids(token_ids: np.ndarray, vocab_size: int) -> None:
    """Raise ValueError if an id is outside the vocabulary. Such an id has no embedding and would end the engine."""
    for place in _foreign(token_ids, vocab_size):
        raise ValueError(f"token id {token_ids[place]} is outside the vocabulary of {vocab_size}")


def _foreign(token_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    return np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Requests a group: `n` samples for one prompt.

    `seeds` has a seed for the random stream of each sample. The same seed, prompt and weights give the same tokens,
    regardless of other requests in the engine. Sampling ends at the first of `stop_token_ids` (kept as the last token)
    or after `max_tokens`. The engine adds no other stop tokens. Temperature 0 is greedy; the log-probs then depend on
    the kind of engine.
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
    flags: tuple[str, ...] = ()  # requests the columns with these values of `Column.asked_by`, which have no field here
    # Earlier samples of the prompt, int32, each preceded by the prompt end. An engine with engine.draft_tokens may
    # draft from them. The samples do not depend on drafts.
    drafts: tuple[np.ndarray, ...] = ()
    # Sample nothing. Return the prompt tokens after the first as a sample, with log-probs at temperature 1 (as
    # `Engine.score` returns), the top K, and the policy version that computed them.
    scored: bool = False
    # Names that requests with a common prefix share, the widest first, e.g. group and conversation. The pool sends such
    # requests to one engine. The request body does not include the names.
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
        """Return the request with each draft cut before the first id outside the vocabulary.

        Raises ValueError if the prompt has such an id.
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

    version: int  # policy version; -1 = the weights have no version of this run
    vocab_size: int
    max_model_len: int  # prompt and response tokens together
    max_logprobs: int  # upper limit of K
    logprobs_mode: str
    dtype: str  # "float32" | "bfloat16" | "float16"
    model: str  # directory that the server was started from
    engine: str  # server name and version
    running: int  # running now: groups from all clients (vLLM), samples for this client (SGLang)
    routed_experts: bool = False  # it can return the experts that each token was routed to
    sampling_mask: bool = False  # it can return the tokens that top_p, top_k and min_p left at each position
    problems: tuple[str, ...] = ()  # reported settings that are unfit for rollouts, with remedies
    instance: str = ""  # identifies this server process and changes with every restart; "" = unknown
    workers: int = 1  # number of processes that have the weights and receive updates
    weight_group: str = ""  # weight group that it can receive broadcasts from; empty = none
    updating_s: float | None = None  # seconds since the running weight update began; None = no update is running


class Engine(Protocol):
    """Calls a server. All methods may be called concurrently; the server serializes `load_weights` calls.

    Every method but `close` raises `EngineTimeout` and `EngineUnavailable`.
    """

    url: str
    counts: Counter[str]
    """Work since the caller cleared the counter, as far as the server reports it:

    prompt_tokens: prompt tokens of each sample, cached or not
    cached_tokens: prompt tokens found in the prefix cache
    sampled_tokens: response tokens
    draft_steps: steps in which a sample had drafts
    drafted: drafted tokens
    accepted: drafted tokens that were sampled
    """

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        """Return the `n` samples, in the order of `seeds`. Raises `InvalidSample` and `EngineRefused`."""

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return fp32 [S - 1]: the log-prob at temperature 1 of each token after the first, given the tokens before it.

        token_ids: [S] int32. The engine computes the log-probs without caches under the current weights. Raises
        `InvalidSample` and `EngineRefused`.
        """

    async def trace(self, token_ids: np.ndarray) -> tuple[Trace, np.ndarray]:
        """Record the forward pass that `score` makes. Return the intermediate values and the scores. Slow.

        token_ids: [S] int32. The trace has the values of every layer and operator that can be hooked. Raises
        `InvalidSample` and `EngineRefused`.
        """

    async def load_weights(self, path: Path, version: int, mode: UpdateMode = "keep") -> float:
        """Serve the model, delta (`weights.delta`) or adapter in the directory `path` as policy `version`.

        Returns how long sampling was paused, in seconds. After `EngineRefused` the old weights are still served. After
        any other error the caller must load weights again before it generates.
        """

    async def join_weight_group(self, plan: WeightGroupPlan) -> None:
        """Make the workers leave earlier groups and join the trainer's group. Return when all have joined."""

    async def receive_weights(self, group: str, step: str, version: int, mode: UpdateMode = "keep") -> float:
        """Serve the weights that the trainer broadcasts in `step` of the joined group as policy `version`.

        Everything else is as in `load_weights`. After an error other than `EngineRefused` the engine is in no group.
        """

    async def weights_fingerprint(self) -> Fingerprint:
        """Return fingerprints that the engine computes from the current weights."""

    async def sleep(self) -> None:
        """Wait for running requests, then free the memory for weights and cache.

        The engine serves no requests until `wake` is called and weights are loaded.
        """

    async def wake(self) -> None:
        """Allocate the memory again. New weights must be loaded before sampling."""

    async def info(self) -> EngineInfo: ...

    async def health(self) -> None:
        """Return None if the engine can serve requests; raise `EngineError` otherwise."""

    async def check_compatible(self, config: Config, *, vocab_size: int | None = None) -> EngineInfo:
        """Raise `EngineIncompatible` with every server setting that disagrees with `config`.

        `vocab_size` is the trainer model's vocabulary size. None skips this check.
        """

    async def abort(self, request_id: str) -> None:
        """End a running request. Its `generate` returns the tokens sampled so far.

        Interrupted samples have finish_reason "abort".
        """

    async def close(self) -> None:
        """Release connections. The server continues."""
