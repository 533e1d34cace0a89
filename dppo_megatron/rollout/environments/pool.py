"""Provide each running trajectory with an environment in a separate worker. Broken workers are replaced."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import Any, TypeVar

from dppo_megatron.config.task import EnvironmentConfig
from dppo_megatron.rollout.rewards.workers import WorkerPool, failure_of
from dppo_megatron.types import Prompt

from .interface import EnvironmentFailed, EnvironmentNameError, StepResult
from .worker import EnvironmentWorker

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class EnvironmentPool:
    """Runs `environment.workers` trajectories at a time. A failure is counted and fails only its trajectory.

    Close it, or use it as a context manager.
    """

    def __init__(self, config: EnvironmentConfig):
        self._pool = WorkerPool(partial(EnvironmentWorker, config), config.workers, "environment")
        self._free = _Free(config.workers)
        self._failures: Counter[str] = Counter()
        self._recent: deque[str] = deque(maxlen=64)  # reasons of failed trajectories

    @asynccontextmanager
    async def session(self, order: int = 0) -> AsyncIterator[Session]:
        """Yield an environment for one trajectory. The waiting trajectory with the lowest `order` is served first."""
        await self._free.take(order)
        session = Session(self._pool)
        try:
            with closing(session):
                yield session
        finally:
            self._free.give_back()

    async def tools(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates take them. Raises `EnvironmentNameError` without a working environment."""
        async with self.session() as session:
            try:
                return await session.tools()
            except EnvironmentFailed as failure:
                raise EnvironmentNameError(f"environment.name: no environment can be created: {failure}") from None

    def count(self, prompt: Prompt, failure: EnvironmentFailed) -> None:
        """Count and log a failed trajectory."""
        self._failures[failure.reason] += 1
        self._recent.append(f"{failure.reason}: {failure}")
        log.warning("environment of prompt row %d failed (%s): %s", prompt.row, failure.reason, failure)

    @property
    def frequent_failure(self) -> str:
        """Return reason and text of the most frequent recent failure, or "" without failures."""
        return max(self._recent, key=self._recent.count, default="")

    def take_metrics(self) -> dict[str, float]:
        """Return how many trajectories failed since the last call, as `environment/failed_REASON`."""
        metrics = {f"environment/failed_{reason}": float(count) for reason, count in self._failures.items()}
        self._failures.clear()
        return metrics

    def close(self) -> None:
        """Terminate the workers at once. May be called again."""
        self._pool.close()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Free:
    """Counts the free slots for trajectories, and queues waiting trajectories."""

    def __init__(self, count: int):
        self._count = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap ordered by (order, arrival)
        self._arrivals = itertools.count()

    async def take(self, order: int) -> None:
        if self._count:
            self._count -= 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._arrivals), waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        while self._waiting:
            *_, waiter = heapq.heappop(self._waiting)
            if not waiter.done():  # done: its task was cancelled
                waiter.set_result(None)
                return
        self._count += 1


class Session:
    """Represents a trajectory's environment. Every request raises `EnvironmentFailed`."""

    def __init__(self, pool: WorkerPool[EnvironmentWorker]):
        self._pool = pool
        self._worker: EnvironmentWorker | None = None
        self._pending = False  # whether a request is pending

    async def tools(self) -> list[dict[str, Any]]:
        return await self._begin(lambda worker: worker.described()[0])

    async def reset(self, prompt: Prompt, seed: int) -> str | None:
        return await self._begin(lambda worker: worker.reset(prompt, seed))

    async def step(self, text: str, opened: str = "") -> StepResult:
        return await self._ask(lambda worker: worker.step(text, opened))

    async def finish(self) -> float | None:
        return await self._ask(lambda worker: worker.finish())

    async def run_agent(self, prompt: Prompt, url: str, key: str) -> float | None:
        self._worker = await self._lease(self._pool.lease)
        return await self._ask(lambda worker: worker.agent(prompt, url, key))

    def close(self) -> None:
        """Return the worker to the pool, or terminate it if a request is pending."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._pool.give_back(worker, usable=not self._pending)

    async def _begin(self, ask: Callable[[EnvironmentWorker], Result]) -> Result:
        """Send the first request. If a worker that served other trajectories dies, repeat it in a new worker."""
        self._worker = await self._lease(self._pool.lease)
        if not self._worker.fresh:
            try:
                return await self._ask(ask)
            except EnvironmentFailed as failure:
                if failure.reason != "died":
                    raise
                self.close()
                self._worker = await self._lease(self._pool.start)
        return await self._ask(ask)

    async def _lease(self, take: Callable[[], EnvironmentWorker]) -> EnvironmentWorker:
        lease = self._pool.in_thread(take)
        try:
            return await self._answered(lease)
        except asyncio.CancelledError:  # the thread continues, so its worker is given back later
            lease.add_done_callback(self._back)
            raise

    def _back(self, lease: Future[EnvironmentWorker]) -> None:
        if not lease.cancelled() and lease.exception() is None:
            self._pool.give_back(lease.result(), usable=True)

    async def _ask(self, ask: Callable[[EnvironmentWorker], Result]) -> Result:
        worker = self._worker
        assert worker is not None
        self._pending = True
        result = await self._answered(self._pool.in_thread(lambda: ask(worker)))
        self._pending = False
        return result

    async def _answered(self, future: Future[Result]) -> Result:
        try:
            return await asyncio.wrap_future(future)
        except EnvironmentFailed:
            self._pending = False  # the failure is an answer
            raise
        except Exception as error:
            raise EnvironmentFailed(*failure_of(error)) from None
