"""Check one engine: whether it is healthy, and whether it has the published weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from dppo_megatron.common.deadline import time_limit
from dppo_megatron.config import Config
from dppo_megatron.rollout.engines.protocol import Engine, EngineError, EngineInfo, EngineTimeout, EngineUnavailable
from dppo_megatron.weights.fingerprint import Fingerprint, differing
from dppo_megatron.weights.published import PublishedPolicy

SHOWN = 8  # weight groups named in an error

Result = TypeVar("Result")


class OtherWeights(EngineError):
    """The engine does not have the weights of the published policy."""


async def check_health(engine: Engine, config: Config, timeout_s: float | None = None) -> EngineInfo:
    """Return the self-description of a healthy engine.

    All callers use this check. Two callers count consecutive failures: `MonitoredEngine` decides whether an engine gets
    requests, and `while_healthy` cancels a call, after which `launch.engine` kills a frozen server.
    `LiveEngines.answering` and `slurm.status` check once.
    Raises `EngineError` if there is no answer within `timeout_s` (default `engine.health_timeout_s`), or if a weight
    update takes longer than `weight_sync.timeout_s`.
    """
    timeout_s = config.engine.health_timeout_s if timeout_s is None else timeout_s
    try:
        async with time_limit(timeout_s):
            await engine.health()
            info = await engine.info()
    except TimeoutError:
        raise EngineTimeout(
            f"engine {engine.url}: no answer to a health check within {timeout_s:g} s; see the server's log"
        ) from None
    longest = config.weight_sync.timeout_s
    if info.updating_s is not None and info.updating_s > longest:
        raise EngineTimeout(
            f"engine {engine.url}: an update of its weights has taken {info.updating_s:.0f} s, longer than "
            f"weight_sync.timeout_s = {longest:g}"
        )
    return info


async def while_healthy(
    engine: Engine, config: Config, call: Coroutine[Any, Any, Result], failures: int | None = None
) -> Result:
    """Return the result of `call`, but cancel it after `failures` consecutive failed health checks.

    `failures` defaults to `engine.health_failures`. The engine is checked every `engine.health_interval_s`. A frozen
    engine is therefore noticed in seconds instead of at the call's time-out. Raises the last check's `EngineError`.
    """
    task = asyncio.ensure_future(call)
    failed = 0
    try:
        while True:
            await asyncio.wait((task,), timeout=config.engine.health_interval_s)
            if task.done():
                return task.result()
            try:
                await check_health(engine, config)
                failed = 0
            except EngineError:
                failed += 1
                if failed >= (failures or config.engine.health_failures) and not task.done():
                    raise
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class ScoreDifference:
    """Measures how far engine and trainer log-probs differ on the weight check tokens, in nats.

    The mean separates wrong weights from rounding. In 16 bits, a single token may differ by several nats if a
    mixture-of-experts router chooses other experts. Stale experts change the mean.
    """

    mean: float  # NaN if any score is NaN
    largest: float

    @classmethod
    def between(cls, scores: np.ndarray, expected: np.ndarray) -> ScoreDifference:
        """Compare scores with expected scores, both fp32 [P - 1]."""
        difference = np.abs(scores - expected)
        return cls(float(difference.mean()), float(difference.max()))

    @classmethod
    def worst(cls, differences: Collection[ScoreDifference]) -> ScoreDifference:
        return cls(max(d.mean for d in differences), max(d.largest for d in differences))

    def within(self, tolerance: float) -> bool:
        return self.mean <= tolerance  # False for NaN

    def __str__(self) -> str:
        return f"{self.mean:.3g} in the mean (at most {self.largest:.3g})"


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Contains the measurements that `check_weights` needs, from an engine instance that has loaded weights."""

    url: str
    instance: str
    version: int  # reported after the measurements
    scores: np.ndarray  # [P - 1] fp32; empty if nothing was scored
    load_s: float
    pause_s: float  # part of load_s in which the engine did not sample
    fingerprint: Fingerprint | None  # fingerprint of the weights; None if not requested


async def load_and_measure(
    engine: Engine, instance: str, load: Callable[[Engine], Awaitable[float]], tokens: np.ndarray, *, fingerprint: bool
) -> Confirmation:
    """Call `load` on engine `instance`, score `tokens` if there are any, and compute the fingerprint if requested.

    `load` returns how many seconds the engine paused. Raises `EngineUnavailable` if the engine restarted.
    """
    started = time.perf_counter()
    pause_s = await load(engine)
    load_s = time.perf_counter() - started
    scores = await engine.score(tokens) if len(tokens) else np.empty(0, np.float32)
    weights_fingerprint = await engine.weights_fingerprint() if fingerprint else None
    info = await engine.info()
    if info.instance != instance:
        raise EngineUnavailable(f"engine {engine.url}: the server restarted during the weight check")
    return Confirmation(engine.url, instance, info.version, scores, load_s, pause_s, weights_fingerprint)


def check_weights(config: Config, confirmation: Confirmation, policy: PublishedPolicy) -> ScoreDifference:
    """Check that an engine has the weights of `policy`; return the score difference. Raises `OtherWeights`.

    Publisher and pool decide only by this function, so the pool does not admit an engine that a publish excluded.
    Compares fingerprints and scores, if both sides have them.
    """
    has_fingerprints = confirmation.fingerprint is not None and policy.fingerprint is not None
    if has_fingerprints and (wrong := differing(policy.fingerprint or {}, confirmation.fingerprint or {})):
        raise OtherWeights(
            f"has other weights than the trainer sent: {some_groups(wrong)}. Its version does not show this; do not "
            "train on its rollouts (weight_sync.fingerprint; docs/failures.md lists the coverage)"
        )
    if not policy.probe_tokens:
        return ScoreDifference(0.0, 0.0)
    difference = ScoreDifference.between(confirmation.scores, np.array(policy.probe_logprobs, np.float32))
    if difference.within(config.probe_tolerance):
        return difference
    engine, quantised = config.engine, ""
    if engine.quantization != "none":
        quantised = (
            f". engine.quantization = {engine.quantization} causes a difference of at least bf16's size: if this "
            "is its size, raise the tolerance, and limit the mismatch by rollout.max_mismatch_kl"
        )
    raise OtherWeights(
        f"log-probs of the weight check differ from the trainer's by {difference}, more than "
        f"weight_sync.probe_tolerance = {config.probe_tolerance:g}. The engine does not serve the trainer's "
        f"weights or computes in another precision (engine.dtype = {engine.dtype}, model.dtype = "
        f"{config.model.dtype}); do not train on its rollouts{quantised}"
    )


def some_groups(groups: Sequence[str]) -> str:
    return ", ".join(groups[:SHOWN]) + (f" and {len(groups) - SHOWN} more" if len(groups) > SHOWN else "")
