"""Asynchronous engine clients for a synchronous caller: one event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from dppo_megatron.rollout.engine import Engine


class EngineThread:
    """Runs a coroutine on every engine at once while the caller goes on computing.

    The clients are made inside the loop's thread, and keep their connections between calls.
    """

    def __init__(self, make_engines: Callable[[], Sequence[Engine]]):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()

        async def make() -> list[Engine]:
            return list(make_engines())

        self._engines = asyncio.run_coroutine_threadsafe(make(), self._loop).result()

    def on_all(self, call: Callable[[Engine], Coroutine[Any, Any, Any]]) -> Future[list[Any]]:
        """Starts `call(engine)` on every engine; the future holds the results in engine order or the first error."""

        async def gather() -> list[Any]:
            return list(await asyncio.gather(*(call(engine) for engine in self._engines)))

        return asyncio.run_coroutine_threadsafe(gather(), self._loop)

    def close(self) -> None:
        self.on_all(lambda engine: engine.close()).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
