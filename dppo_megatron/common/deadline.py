"""Define time limits that count only time when this process ran.

A job that is suspended, or a host without free CPU time, would otherwise lose the rewards and engines it waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator

_TICK_S = 1.0  # longest wait before the time is counted


class Deadline:
    """Counts `seconds` down. At most `_TICK_S` counts between two `tick` calls."""

    def __init__(self, seconds: float):
        self._left = seconds
        self._counted = time.monotonic()

    def tick(self) -> float:
        """Return the seconds to wait until the next call. Raises `TimeoutError` when none are left."""
        now = time.monotonic()
        self._left -= min(now - self._counted, _TICK_S)
        self._counted = now
        if self._left <= 0:
            raise TimeoutError
        return min(self._left, _TICK_S)


@contextlib.asynccontextmanager
async def time_limit(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the body after `seconds`, if not None, and raise `TimeoutError`, as `asyncio.timeout` does."""
    loop, deadline = asyncio.get_running_loop(), Deadline(math.inf if seconds is None else seconds)
    async with asyncio.timeout(None) as limit:
        timer: asyncio.Handle = loop.call_soon(lambda: count())

        def count() -> None:
            nonlocal timer
            try:
                timer = loop.call_later(deadline.tick(), count)
            except TimeoutError:
                limit.reschedule(loop.time())

        try:
            yield limit
        finally:
            timer.cancel()
