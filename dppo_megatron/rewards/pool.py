"""Runs rewards so that none can stop or stall the run: own processes, timeouts, failures counted."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from dppo_megatron.types import Prompt

from .outcome import Failure, attempt, describe
from .registry import build_reward
from .worker import Worker, WorkerError, WorkerTimeout

if TYPE_CHECKING:
    from dppo_megatron.config.schema import RewardConfig

log = logging.getLogger(__name__)

_LOGGED_PER_REASON = 5  # then whenever their number has doubled


class RewardPool:
    """Scores responses with the reward that `config.name` names, `config.workers` at a time.

    A sample whose verifier raises, returns something that is not a finite number, runs longer than
    `config.timeout_s`, or ruins its process scores 0 and is marked failed. Processes that hang, die or write to the
    channel of the results are replaced. Rewards with `trusted = True` are called directly, without process or timeout.

    Raises `RewardError` on construction when there is no such reward. Close it, or use it as a context manager.
    """

    def __init__(self, config: RewardConfig):
        self._config = config
        reward = build_reward(config)
        self._inline = reward if getattr(reward, "trusted", False) else None
        self._threads = ThreadPoolExecutor(config.workers, "reward")  # each waits for one worker
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._closed = False
        self._scored = 0
        self._failures: Counter[str] = Counter()  # by reason

    async def score(self, prompt: Prompt, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Rewards [n] fp32 and failed [n] bool of n responses to one prompt; raises nothing a reward does."""
        if self._inline is not None:
            outcomes = [attempt(self._inline, prompt, text) for text in texts]
        else:
            run = asyncio.get_running_loop().run_in_executor
            outcomes = await asyncio.gather(*(run(self._threads, self._in_worker, prompt, text) for text in texts))
        rewards = np.zeros(len(texts), dtype=np.float32)
        failed = np.zeros(len(texts), dtype=bool)
        self._scored += len(texts)
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, Failure):
                failed[i] = True
                self._count(prompt, outcome)
            else:
                rewards[i] = outcome
        return rewards, failed

    def close(self) -> None:
        """Stops the workers at once, running verifiers included. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in tuple(self._workers):
            worker.end()
        self._threads.shutdown()
        if self._failures:
            log.warning("rewards of %d of %d samples failed: %s", *self._totals())

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _in_worker(self, prompt: Prompt, text: str) -> float | Failure:
        """A sample that ends its worker is charged with it only where no other sample can have harmed the worker."""
        worker = None
        try:
            worker = self._idle_worker() or self._start_worker()
            if not worker.fresh:
                try:
                    return self._scored_by(worker, prompt, text)
                except WorkerTimeout:
                    raise
                except WorkerError:
                    worker = self._start_worker()
            return self._scored_by(worker, prompt, text)
        except WorkerTimeout:
            return Failure("timeout", f"no reward within reward.timeout_s = {self._config.timeout_s:g} s")
        except WorkerError as error:
            return Failure("died", str(error))
        # What cannot be sent to a worker, such as columns that do not pickle; their code is foreign too.
        except BaseException as error:
            return Failure("raised", describe(error))

    def _scored_by(self, worker: Worker, prompt: Prompt, text: str) -> float | Failure:
        try:
            outcome = worker.score(prompt, text, self._config.timeout_s)
        except WorkerError:
            self._end(worker)
            raise
        except BaseException:
            self._idle.append(worker)
            raise
        self._idle.append(worker)
        return outcome

    def _idle_worker(self) -> Worker | None:
        while self._idle:
            try:
                worker = self._idle.pop()
            except IndexError:  # another thread took the last one
                return None
            if worker.usable:
                return worker
            log.warning("a verifier's process ended or wrote where it must not while nobody asked; starting a new one")
            self._end(worker)
        return None

    def _start_worker(self) -> Worker:
        worker = Worker(self._config.name)
        self._workers.add(worker)
        try:
            if self._closed:
                raise WorkerError("the rewards are closed")
            worker.load()  # an error that the worker alone has is told by every sample
        except WorkerError:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: Worker) -> None:
        worker.end()
        self._workers.discard(worker)

    def _count(self, prompt: Prompt, failure: Failure) -> None:
        self._failures[failure.reason] += 1
        count = self._failures[failure.reason]
        if count <= _LOGGED_PER_REASON or count.bit_count() == 1:
            log.warning("reward of prompt row %d failed (%s): %s", prompt.row, failure.reason, failure.detail)
        if count > _LOGGED_PER_REASON and count.bit_count() == 1:
            log.warning("rewards of %d of %d samples failed so far: %s", *self._totals())

    def _totals(self) -> tuple[int, int, str]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._failures.most_common())
        return self._failures.total(), self._scored, reasons
