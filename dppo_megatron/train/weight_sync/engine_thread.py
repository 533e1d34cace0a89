"""Run asynchronous engine clients for a synchronous caller, in an event loop in a separate thread."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from dppo_megatron.rollout.fleet.live_engines import LiveEngines

from .transport import WeightSyncError

Result = TypeVar("Result")


class EngineThread:
    """Runs coroutines on the engines while the caller computes.

    The clients are made inside the loop thread, and keep their connections between calls.
    """

    def __init__(self, engines: LiveEngines):
        self._engines = engines
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # for an error that ends the trainer

    def start(self, call: Callable[[LiveEngines], Coroutine[Any, Any, Result]]) -> Future[Result]:
        """Start `call` with the `LiveEngines`. Return a future with the result or error."""
        return asyncio.run_coroutine_threadsafe(call(self._engines), self._loop)

    def put_to_sleep(self) -> None:
        """Make every reachable engine free its GPU memory. Raises `WeightSyncError` naming the engines that failed."""

        async def sleep(live: LiveEngines) -> list[str]:
            answering, _ = await live.answering()
            replies = await live.on(answering, lambda engine: engine.sleep())
            return [str(reply) for reply in replies.values() if isinstance(reply, Exception)]

        if problems := self.start(sleep).result():
            raise WeightSyncError("engines did not free their memory for the trainer:\n  " + "\n  ".join(problems))

    def close(self) -> None:
        atexit.unregister(self.close)
        self.start(lambda engines: engines.close()).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
