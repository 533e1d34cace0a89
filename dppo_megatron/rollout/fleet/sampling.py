"""Send a request until an engine answers it, within one retry budget.

| event | request | limit |
|---|---|---|
| engine dies, freezes, times out, fails | sent unchanged to a serving engine: same seeds, tokens | `ENGINE_ATTEMPTS` |
| engine returns an invalid sample | sent unchanged to an engine that did not | `ENGINE_ATTEMPTS` |
| engine returns an invalid sample, no other engine remains | created again with other seeds | `SEED_ATTEMPTS` |
| engine interrupts samples, as for an update | continued from their tokens, with derived seeds | none |
| engine rejects the request or does not suit the run | not repeated: the run ends with the error | |
| no engine serves | waits for an engine | `engine.unavailable_timeout_s` |

This is the only retry budget. Of the three layers with `generate`, only `Sampler` repeats a request; `MonitoredEngine`
and the engine's client (`VllmEngine`) send it once. The client waits while a server answers "503, try again", within
`engine.request_timeout_s`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from dppo_megatron.rollout.engines.protocol import (
    EngineError,
    EngineIncompatible,
    EngineRefused,
    GenerateRequest,
    InvalidSample,
)
from dppo_megatron.types import Rollout, join_columns

log = logging.getLogger(__name__)

# The retry budget. An interruption is not a failure: every continuation is a new request.
ENGINE_ATTEMPTS = 8  # attempts per request, because a request may crash every engine
SEED_ATTEMPTS = 3  # attempts per group

Failures = Mapping[str, EngineError]
"""Maps the name of every engine that received one request to the engine's last error."""


class SamplingEngine(Protocol):
    name: str

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        """Return the samples, as `Engine.generate`."""


class SamplingEngines(Protocol):
    """Provides engines that can receive requests: `EnginePool` or `FixedEngines`."""

    async def select(self, request: GenerateRequest, failures: Failures) -> SamplingEngine | None:
        """Return the engine for the next attempt, or None if no remaining engine can answer."""

    def take_metrics(self) -> dict[str, float]:
        """Return event counts since the last call."""


class Sampler:
    """Samples groups with the engines that serve. See the table at the top of this module."""

    def __init__(self, engines: SamplingEngines):
        self._engines = engines
        self._counts: Counter[str] = Counter()

    async def sample(self, request: Callable[[int], GenerateRequest], subject: str) -> tuple[Rollout, ...]:
        """Return the complete samples of `request(0)`, or of the first later attempt without an invalid sample.

        `request` gives every attempt separate seeds and an id; `subject` names the group in messages. Raises
        `InvalidSample` when all attempts were invalid, otherwise as `generate`.
        """
        problem: InvalidSample | None = None
        for attempt in range(SEED_ATTEMPTS):
            try:
                return await self.generate(request(attempt))
            except InvalidSample as error:
                log.warning("%s: rejected an invalid sample (%s)", subject, error)
                problem = error
        raise InvalidSample(
            f"{subject}: the engine returned an invalid group {SEED_ATTEMPTS} times; the last: {problem}"
        )

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        """Return the `n` samples in the order of `seeds`, all complete.

        An interrupted sample may have tokens from several policies; every token keeps the log-prob and version from
        when it was sampled. Raises `InvalidSample` when every remaining engine returned an invalid sample,
        `EngineRefused`, `EngineIncompatible`, and the last `EngineError` when the budget is spent.
        """
        rollouts = await self._send(request)
        if all(rollout.finish_reason != "abort" for rollout in rollouts):
            return rollouts
        return tuple(await asyncio.gather(*(self._complete(request, i, r) for i, r in enumerate(rollouts))))

    async def _complete(self, request: GenerateRequest, sample: int, rollout: Rollout) -> Rollout:
        piece = 0
        while rollout.finish_reason == "abort":
            left = request.max_tokens - len(rollout.token_ids)
            if left == 0:
                return replace(rollout, finish_reason="length")
            piece += 1
            self._counts["rollout/continued_samples"] += 1
            (rest,) = await self._send(_continuation(request, sample, rollout.token_ids, left, piece))
            rollout = Rollout.from_columns(
                join_columns([rollout.columns, rest.columns]),
                token_ids=np.concatenate([rollout.token_ids, rest.token_ids]),
                finish_reason=rest.finish_reason,
            )
        return rollout

    async def _send(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        """Send the request, unchanged, to one engine after another until an engine answers."""
        failures: dict[str, EngineError] = {}
        for attempt in range(ENGINE_ATTEMPTS):
            engine = await self._engines.select(request, failures)
            if engine is None:
                break
            # The server may still be ending the previous attempt, and accepts each id once.
            attempt_request = replace(request, request_id=f"{request.request_id}~{attempt}") if attempt else request
            try:
                return await engine.generate(attempt_request)
            except (EngineRefused, EngineIncompatible):
                raise
            except EngineError as error:
                failures[engine.name] = last = error
                self._counts["engine/retried_requests"] += 1
                if isinstance(error, InvalidSample):
                    self._counts["rollout/invalid_samples"] += 1
                log.warning("sending a request again: %s", error)
        raise last

    def take_metrics(self) -> dict[str, float]:
        """Return event counts for requests and engines since the last call."""
        names = ("engine/retried_requests", "rollout/invalid_samples", "rollout/continued_samples")
        counted = {name: float(self._counts[name]) for name in names}
        self._counts.clear()
        return {**self._engines.take_metrics(), **counted}


def _continuation(request: GenerateRequest, sample: int, tokens: np.ndarray, left: int, piece: int) -> GenerateRequest:
    # The engine draws from the start of a seed's stream, so the same seed would repeat the draws of the first tokens.
    seed = np.random.SeedSequence([request.seeds[sample], len(tokens)]).generate_state(1, np.uint64)[0]
    return replace(
        request,
        request_id=f"{request.request_id}+{sample}.{piece}",
        token_ids=np.concatenate([request.token_ids, tokens]),
        n=1,
        seeds=(int(seed) >> 1,),
        max_tokens=left,
    )
