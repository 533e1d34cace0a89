"""Represent a sample's outcome: a number, or the reason why the sample has no number."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dppo_megatron.types import Prompt

from .interface import NotApplicable, Reward, Ungradable

LONGEST_DETAIL = 500  # characters of an error in the log
LONGEST_ANSWER = 200  # characters that distinguish final answers
UNFIT = "; a reward takes (prompt, response_text) and returns a number"
_PACKAGE = f"{Path(__file__).parents[2]}/"
_NOT_THE_USERS = ("<", _PACKAGE, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
_unawaited: list[str] = []  # Python's warnings about dropped coroutines during the last attempt
_runner = asyncio.Runner()
_LARGEST = float(np.finfo(np.float32).max)


class Failure(NamedTuple):
    """Describes a sample without a reward.

    `reason`: raised | not_finite | timeout | died | ungradable (the grader cannot decide) | not_applicable (no term
    scores the row).
    """

    reason: str
    detail: str


Outcome = float | Failure | None  # None: not applicable


def attempt(reward: Reward, prompt: Prompt, text: str) -> Outcome:
    """Call the reward; return a number in the fp32 range, None or a failure. Any error fails only this sample.

    An async reward's coroutine is run to the end. A plain function that drops a coroutine may have tested its truth
    value, so the sample fails. BaseException is caught, because math-verify's timeout, sys.exit and asyncio's
    CancelledError are not Exceptions. No task is cancelled and no signal raises here.
    """
    _unawaited.clear()
    try:
        returned = reward(prompt, text)
        if _unawaited and not inspect.isawaitable(returned):
            raise TypeError(f"{_unawaited[0]}; call it in an async function, with await")
        returned = awaited(returned)
        return None if isinstance(returned, NotApplicable) else as_outcome(returned)
    except Ungradable as error:
        return Failure("ungradable", describe(error))
    except BaseException as error:
        innermost = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        unfit = isinstance(error, TypeError) and innermost.startswith(_PACKAGE)  # wrong arguments or a wrong result
        return Failure("raised", describe(error)[:300] + (UNFIT if unfit else place(error)))


def refuse_unawaited() -> None:
    """Make coroutines that this process drops visible to `attempt`."""
    warnings.filterwarnings("error", "coroutine .* was never awaited", RuntimeWarning)
    sys.unraisablehook = lambda event: (
        _unawaited.append(str(event.exc_value))
        if isinstance(event.exc_value, RuntimeWarning)
        else sys.__unraisablehook__(event)
    )


def as_outcome(returned: Any) -> float | Failure:
    """Convert a reward value to a number, from int, float, bool, a NumPy scalar or a tensor with one element.

    Raises TypeError for text and None, and any error that the conversion of another class raises.
    """
    if returned is None or isinstance(returned, (str, bytes, bytearray)):  # float("nan"), float("1")
        raise TypeError(f"it returned {type(returned).__name__}, expected a number")
    value = float(returned)
    if not math.isfinite(value) or abs(value) > _LARGEST:
        return Failure("not_finite", f"it returned {value!r}")
    return value


def problem_of(reward: Any, answer: str) -> str | None:
    """Return why a grader rejects a reference answer, or None."""
    try:
        awaited(reward.check_answer(answer))
    except ValueError as error:
        remedy = "; set reward.name to gsm8k, which reads the number after ####" if "####" in answer else ""
        return f"{str(error)[:LONGEST_DETAIL]}{remedy}".encode(errors="backslashreplace").decode()
    except BaseException as error:
        return describe(error)
    return None


def final_answer(reward: Any, text: str) -> str | None:
    """Return the answer that a grader finds in a response, or None if it finds no answer or raises."""
    try:
        answer = awaited(reward.final_answer(text))
        return None if answer is None else str(answer)[:LONGEST_ANSWER].encode(errors="backslashreplace").decode()
    except BaseException:
        return None


def awaited(value: Any) -> Any:
    """Return the value or, for an awaitable, the result; every awaitable runs in a single event loop of this process.

    Samples may thus share a client, a lock or a connection, which belong to the loop that first used them.
    """

    async def finish() -> Any:
        return await value

    return _runner.run(finish()) if inspect.isawaitable(value) else value


def describe(error: BaseException) -> str:
    """Return an error's type and text as valid UTF-8, even if the conversion to text fails."""
    text = type(error).__name__
    with contextlib.suppress(BaseException):
        text = f"{text}: {error}"
    return text[:LONGEST_DETAIL].encode(errors="backslashreplace").decode()


def place(error: BaseException) -> str:
    """Return ` (FILE, line N)` of the user's line that raised an error, or "" if no user's line raised it."""
    with contextlib.suppress(BaseException):
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        if isinstance(error, SyntaxError) and error.filename and error.lineno:
            frames.append((error.filename, error.lineno))
        file, line = [frame for frame in frames if not frame[0].startswith(_NOT_THE_USERS)][-1]
        return f" ({file}, line {line})"[:LONGEST_DETAIL]
    return ""
