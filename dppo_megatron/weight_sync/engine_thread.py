"""Asynchronous engine clients for a synchronous caller: one event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from dppo_megatron.fleet.live_engines import LiveEngines

Result = TypeVar("Result")


class EngineThread:
    """Runs coroutines on the engines while the caller goes on computing.

    The clients are made inside the loop's thread, and keep their connections between calls.
    """

    def __init__(self, make: Callable[[], LiveEngines]):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()

        async def in_the_loop() -> LiveEngines:
            return make()

        self._engines = asyncio.run_coroutine_threadsafe(in_the_loop(), self._loop).result()
        atexit.register(self.close)  # of a trainer that an error ends

    def start(self, call: Callable[[LiveEngines], Coroutine[Any, Any, Result]]) -> Future[Result]:
        """Starts `call` on the engines; the future holds its result or its error."""
        return asyncio.run_coroutine_threadsafe(call(self._engines), self._loop)

    def close(self) -> None:
        atexit.unregister(self.close)
        self.start(lambda engines: engines.close()).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
