"""What became of one sample: a number, or why there is none."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from typing import NamedTuple

import numpy as np

from dppo_megatron.types import Prompt

from .interface import Reward

LONGEST_DETAIL = 500  # characters of an error in the log
_LARGEST = float(np.finfo(np.float32).max)


class Failure(NamedTuple):
    """A sample without a reward. `reason`: raised | not_finite | timeout | died."""

    reason: str
    detail: str


def attempt(reward: Reward, prompt: Prompt, text: str) -> float | Failure:
    """The reward as a number that fp32 holds. A reward is foreign code: whatever it raises concerns one sample alone.

    Of an async reward the coroutine is run to its end. BaseException, because math-verify's own time-out, sys.exit and
    asyncio's CancelledError are no Exceptions; here nobody cancels and no signal raises.
    """
    try:
        returned = reward(prompt, text)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_finish(returned))
        if isinstance(returned, (str, bytes, bytearray)):  # float("nan"), float("1")
            raise TypeError(f"it returned {type(returned).__name__}, expected a number")
        value = float(returned)
        if not math.isfinite(value) or abs(value) > _LARGEST:
            return Failure("not_finite", f"it returned {value!r}")
    except BaseException as error:
        return Failure("raised", describe(error))
    return value


async def _finish(awaitable):
    return await awaitable


def describe(error: BaseException) -> str:
    """Type and text of an error, which may refuse to be text, as UTF-8 can hold it."""
    text = type(error).__name__
    with contextlib.suppress(BaseException):
        text = f"{text}: {error}"
    return text[:LONGEST_DETAIL].encode(errors="backslashreplace").decode()
