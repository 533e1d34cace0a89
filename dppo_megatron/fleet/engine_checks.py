"""Check one engine: whether it is healthy, and whether its log-probs match the trainer's."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.engines.protocol import Engine, EngineError, EngineInfo, EngineTimeout

Result = TypeVar("Result")


async def check_health(engine: Engine, config: Config, timeout_s: float | None = None) -> EngineInfo:
    """Return the self-description of a healthy engine.

    All callers use this check. Two callers count consecutive failures. `MonitoredEngine` decides whether an engine gets
    requests. `while_healthy` cancels one call and, in `launch.engine`, terminates a frozen server.
    `LiveEngines.answering` and `slurm.status` check once.
    Raises `EngineError` without an answer within `timeout_s` (default `engine.health_timeout_s`), and when an update of
    its weights takes longer than `weight_sync.timeout_s`.
    """
    timeout_s = config.engine.health_timeout_s if timeout_s is None else timeout_s
    try:
        async with asyncio.timeout(timeout_s):
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

    The default of `failures` is `engine.health_failures`. The engine is checked every `engine.health_interval_s`. A
    frozen engine is therefore noticed in seconds instead of after the call's own time-out. Raises the last check's
    `EngineError`.
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
    """Measures the difference between an engine's and the trainer's log-probs of the weight check's tokens, in nats.

    The mean separates wrong weights from rounding. In 16 bits a single token may differ by several nats, if the router
    of a mixture of experts chooses other experts; stale experts change the mean.
    """

    mean: float  # NaN if any score is NaN
    largest: float

    @classmethod
    def between(cls, scores: np.ndarray, expected: np.ndarray) -> ScoreDifference:
        """Compare scores with the expected ones, both fp32 [P - 1]."""
        difference = np.abs(scores - expected)
        return cls(float(difference.mean()), float(difference.max()))

    @classmethod
    def worst(cls, differences: Collection[ScoreDifference]) -> ScoreDifference:
        return cls(max(d.mean for d in differences), max(d.largest for d in differences))

    def within(self, tolerance: float) -> bool:
        return self.mean <= tolerance  # False for NaN

    def __str__(self) -> str:
        return f"{self.mean:.3g} in the mean (at most {self.largest:.3g})"
