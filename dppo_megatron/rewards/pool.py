"""Runs rewards so that none can stop or stall the run: own processes, timeouts, failures counted."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as SampleTimeout
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pebble import ProcessExpired, ProcessPool

from dppo_megatron.types import Prompt

from .interface import Reward
from .registry import RewardError, build_reward, load_reward

if TYPE_CHECKING:
    from dppo_megatron.config.schema import RewardConfig

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_LOOK_S = 1.0  # between looks at whether the pool still works
_LOGGED_PER_REASON = 5
_LONGEST_DETAIL = 500  # characters of an error in the log
_LARGEST = float(np.finfo(np.float32).max)


class RewardPool:
    """Scores responses with the reward that `config.name` names, `config.workers` at a time.

    A sample whose verifier raises, returns something that is not a finite number, runs longer than
    `config.timeout_s`, or kills its process scores 0 and is marked failed. Processes that hang or die are
    replaced. Rewards with `trusted = True` are called directly, without process or timeout.

    Raises `RewardError` on construction when there is no such reward. Close it, or use it as a context
    manager.
    """

    def __init__(self, config: RewardConfig):
        self._config = config
        reward = build_reward(config)
        self._inline = reward if getattr(reward, "trusted", False) else None
        self._pool: ProcessPool | None = None
        self._failures: Counter[str] = Counter()  # by reason: "raised", "not_finite", "timeout", "died"

    async def score(self, prompt: Prompt, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Rewards [n] fp32 and failed [n] bool of n responses to one prompt; raises nothing a reward does."""
        if self._inline is not None:
            outcomes = [_attempt(self._inline, prompt, text) for text in texts]
        else:
            outcomes = await asyncio.gather(*(self._score_in_worker(prompt, text) for text in texts))
        rewards = np.zeros(len(texts), dtype=np.float32)
        failed = np.zeros(len(texts), dtype=bool)
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, _Failure):
                failed[i] = True
                self._log(prompt, outcome)
            else:
                rewards[i] = outcome
        return rewards, failed

    def close(self) -> None:
        """Stops the workers at once, running verifiers included. Harmless when repeated."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _score_in_worker(self, prompt: Prompt, text: str) -> float | _Failure:
        arguments = (self._config.name, prompt, text)
        for _ in range(_ATTEMPTS):
            try:
                pool = self._workers()
                return await _result(pool, pool.schedule(_score, args=arguments, timeout=self._config.timeout_s))
            except SampleTimeout:
                return _Failure("timeout", f"no reward within reward.timeout_s = {self._config.timeout_s:g} s")
            except ProcessExpired as error:
                return _Failure("died", f"the verifier's process ended with exit code {error.exitcode}")
            except RuntimeError:
                # The pool gave up as a whole, e.g. as an idle worker was killed: not this sample's doing.
                continue
            # Whatever cannot be sent to a worker, such as columns that do not pickle.
            except Exception as error:
                return _Failure("raised", _describe(error))
        return _Failure("died", f"the verifier processes broke down {_ATTEMPTS} times")

    def _workers(self) -> ProcessPool:
        if self._pool is not None and not self._pool.active:
            log.warning("the verifier processes broke down; starting new ones")
            self.close()
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=self._config.workers,
                # Not fork: the caller has threads, and a worker must not inherit its locks and sockets.
                context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(self._config.name, os.getpid()),
            )
        return self._pool

    def _log(self, prompt: Prompt, failure: _Failure) -> None:
        self._failures[failure.reason] += 1
        if self._failures[failure.reason] <= _LOGGED_PER_REASON:
            log.warning("reward of prompt row %d failed (%s): %s", prompt.row, failure.reason, failure.detail)


async def _result(pool: ProcessPool, future: Future) -> float | _Failure:
    """What `future` gives. Raises `BrokenProcessPool` soon after the pool broke: it fails the tasks it has sent to its
    workers, and leaves for ever those that still wait to be sent."""
    result = asyncio.wrap_future(future)
    try:
        while not result.done():
            await asyncio.wait((result,), timeout=_LOOK_S)
            if not (result.done() or pool.active):
                raise BrokenProcessPool
        return result.result()
    finally:
        result.cancel()


class _Failure(NamedTuple):
    reason: str
    detail: str


def _attempt(reward: Reward, prompt: Prompt, text: str) -> float | _Failure:
    # A reward is foreign code: whatever it raises concerns one sample alone. BaseException, because math-verify's own
    # time-out, sys.exit and asyncio's CancelledError are no Exceptions; here nobody cancels and no signal raises.
    try:
        value = float(reward(prompt, text))
    except BaseException as error:
        return _Failure("raised", _describe(error))
    if not math.isfinite(value) or abs(value) > _LARGEST:
        return _Failure("not_finite", f"it returned {value!r}")
    return value


def _describe(error: BaseException) -> str:
    """Type and text of an error, which may refuse to be text."""
    try:
        return f"{type(error).__name__}: {error}"[:_LONGEST_DETAIL]
    except Exception:
        return type(error).__name__


_loaded = functools.cache(load_reward)  # one reward object per worker process


def _start_worker(name: str, parent: int) -> None:
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    # Here, because loading does not count against the first sample's timeout. An error that this process
    # alone has is left for the samples to report: raising would break the pool.
    with contextlib.suppress(RewardError):
        _loaded(name)


def _score(name: str, prompt: Prompt, text: str) -> float | _Failure:
    return _attempt(_loaded(name), prompt, text)


def _die_with(parent: int) -> None:
    # A killed parent cannot stop its workers, and one that hangs would outlive it for ever.
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
