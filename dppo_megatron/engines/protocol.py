"""The protocol of a rollout engine, the same for every kind of server.

Tokens in, tokens out. An engine samples groups, scores sequences, and swaps its weights; it knows nothing of rewards
or training. Every call is bounded in time and raises `EngineTimeout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.types import Rollout
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
    """The engine understood the request and refused it; repeating it would be refused again."""


class EngineIncompatible(EngineError):
    """The engine's settings disagree with the run's; the message lists every disagreement with its remedy."""


class InvalidSample(EngineError):
    """The engine answered, but the samples cannot be those of the request. They must never be trained on."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One group: `n` samples of one prompt.

    `seeds` names the random stream of each sample; the same seed, prompt and weights give the same tokens whatever
    else the engine is doing. Sampling ends at the first of `stop_token_ids` (kept as the last token) or after
    `max_tokens`; the engine adds no stop tokens of its own. Temperature 0 is greedy; its log-probs are the engine's
    choice.
    """

    request_id: str  # unique among running requests
    token_ids: np.ndarray  # [P] int32
    n: int
    seeds: tuple[int, ...]  # n of them, 0 <= seed < 2**63
    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    topk: int = 0  # K most likely tokens per position; 0 = none
    routed_experts: bool = False  # return the experts that each token was routed to
    top_p: float = 1.0  # below 1 without `sampling_mask` the engine chooses whether log-probs are over the mask
    top_k: int = 0  # draw from so many most likely tokens; 0 = all
    min_p: float = 0.0  # draw from tokens with at least this share of the most likely one's probability
    sampling_mask: bool = False  # return which tokens top_p, top_k and min_p left at each position

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
            # Below 0.01 servers quietly sample at 0.01, and the log-probs would belong to another temperature.
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
        ]
        wrong = [message for is_wrong, message in problems if is_wrong]
        if wrong:
            raise ValueError(f"generate request {self.request_id!r}: {'; '.join(wrong)}")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a server reports about itself."""

    version: int  # policy version of the weights; -1 = not one of ours
    vocab_size: int
    max_model_len: int  # prompt and response together, tokens
    max_logprobs: int  # cap on K
    logprobs_mode: str
    dtype: str  # "float32" | "bfloat16" | "float16"
    model: str  # directory the server was started from
    engine: str  # name and version of the server
    running: int  # being sampled now: groups of all clients (vLLM), samples of this client (SGLang)
    routed_experts: bool = False  # it can return the experts that each token was routed to
    sampling_mask: bool = False  # it can return which tokens top_p, top_k and min_p left at each position
    problems: tuple[str, ...] = ()  # settings it reports as unfit for rollouts, each with its remedy
    instance: str = ""  # names this instance of the server: another one after every restart; "" = unknown
    workers: int = 1  # processes that hold its weights and receive new ones
    weight_group: str = ""  # name of the group whose broadcasts they can receive; empty = none
    updating_s: float | None = None  # since the update of its weights began that goes on now; None = none does


class Engine(Protocol):
    """One server. All methods may be called concurrently; `load_weights` calls are serialised by the server.

    Every method but `close` raises `EngineTimeout` and `EngineUnavailable`.
    """

    url: str

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        """Return the `n` samples, in the order of `seeds`. Raises `InvalidSample` and `EngineRefused`."""
        ...

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """fp32 [S - 1]: log-prob at temperature 1 of each token after the first given those before it ([S] int32),
        computed afresh under the current weights. Raises `InvalidSample` and `EngineRefused`."""
        ...

    async def trace(self, token_ids: np.ndarray) -> tuple[Trace, np.ndarray]:
        """Return values inside the pass that `score` makes of [S] int32, of every layer and operator that can be
        hooked, and the scores. Slow. Raises `InvalidSample` and `EngineRefused`."""
        ...

    async def load_weights(self, path: Path, version: int, mode: UpdateMode = "keep") -> float:
        """Serve the weights in the directory `path`, a model or a delta (`weights.delta`), as policy `version`. Returns
        the seconds without sampling. When it raises `EngineRefused` the old weights still serve; after any
        other error call it again before generating."""
        ...

    async def join_weight_group(self, plan: WeightGroupPlan) -> None:
        """Make the workers members of the trainer's group, and of no earlier one. Returns when all have joined."""
        ...

    async def receive_weights(self, group: str, step: str, version: int, mode: UpdateMode = "keep") -> float:
        """Serve what the trainer broadcasts in `step` of the joined group as policy `version`. As `load_weights`;
        after an error other than `EngineRefused` the engine is in no group."""
        ...

    async def weights_fingerprint(self) -> Fingerprint:
        """Return fingerprints of the weights that the engine holds now, computed by it."""
        ...

    async def sleep(self) -> None:
        """Free the memory of weights and cache once running requests have ended. The engine serves nothing until it
        woke and loaded weights."""
        ...

    async def wake(self) -> None:
        """Allocate the memory again. New weights must be loaded before sampling."""
        ...

    async def info(self) -> EngineInfo: ...

    async def version(self) -> int:
        """Return the policy version now served; -1 if the weights are not one of ours."""
        ...

    async def health(self) -> None:
        """Return if the engine can serve, else raise."""
        ...

    async def check_compatible(self, config: Config, *, vocab_size: int | None = None) -> EngineInfo:
        """Raise `EngineIncompatible` with every setting of the server that disagrees with `config`.

        `vocab_size` is that of the trainer's model; None leaves it unchecked.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a running request; `generate` returns what was sampled, with finish_reason "abort" where interrupted."""
        ...

    async def close(self) -> None:
        """Release connections. The server continues."""
        ...
