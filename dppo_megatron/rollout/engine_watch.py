"""Asking an engine whether it lives, alone and beside a call that may take long."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from dppo_megatron.config.schema import EngineConfig

from .engine import Engine, EngineError, EngineInfo, EngineTimeout

Result = TypeVar("Result")


async def probe_health(engine: Engine, timeout_s: float) -> EngineInfo:
    """What a healthy engine says of itself. Raises `EngineError` when it does not within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await engine.health()
            return await engine.info()
    except TimeoutError:
        raise EngineTimeout(f"engine {engine.url}: no answer to a health probe within {timeout_s:g} s") from None


async def while_healthy(engine: Engine, config: EngineConfig, call: Coroutine[Any, Any, Result]) -> Result:
    """Result of `call`, which is given up when the engine fails `engine.health_failures` probes in a row meanwhile.

    So an engine that froze costs seconds and not the call's own time-out. Raises the last probe's `EngineError`.
    """
    task = asyncio.ensure_future(call)
    failures = 0
    try:
        while True:
            await asyncio.wait((task,), timeout=config.health_interval_s)
            if task.done():
                return task.result()
            try:
                await probe_health(engine, config.health_timeout_s)
                failures = 0
            except EngineError:
                failures += 1
                if failures >= config.health_failures and not task.done():
                    raise
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
