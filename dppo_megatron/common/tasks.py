"""Wait for asyncio tasks that belong together."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TypeVar

Result = TypeVar("Result")


async def results_of(tasks: Collection[asyncio.Task[Result]]) -> list[Result]:
    """Return the results of all tasks. If one fails, or the caller is cancelled, cancel the others.

    `asyncio.gather` alone lets the others run after a failure, and `cancel` of its future then does nothing.
    """
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
