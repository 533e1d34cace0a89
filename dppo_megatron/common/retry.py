"""Retry a call that may fail temporarily, within a budget of attempts and time, and wait for a condition."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, Unpack

import tenacity

Result = TypeVar("Result")
Errors = type[Exception] | tuple[type[Exception], ...]


def doubling_delay_s(first_s: float, doublings: int, longest_s: float) -> float:
    """Return a delay that doubles each time up to `longest_s`, for any count: 2**1024 is too large for a float."""
    return min(first_s * 2.0 ** min(doublings, 64), longest_s)


@dataclass(frozen=True, slots=True)
class RetryBudget:
    """Limits the number and the total time of attempts. The limit that is reached first applies; set at least one.

    The pause after a failure begins at `first_pause_s` and doubles up to `longest_pause_s`. With `jitter`, each pause
    is drawn uniformly between 0 and this value, so that many callers do not return to a server at the same moment.
    """

    attempts: int | None = None  # including the first one
    timeout_s: float | None = None  # no attempt begins later than this after the first
    first_pause_s: float = 0.0
    longest_pause_s: float = 30.0
    jitter: bool = False

    def __post_init__(self) -> None:
        if self.attempts is None and self.timeout_s is None:
            raise ValueError("RetryBudget: set attempts, timeout_s or both; with neither a call could repeat forever")


class RetryRules(TypedDict, total=False):
    """Lists the keyword arguments of `retry` and `retry_async`, which document them."""

    on: Errors
    unless: Errors
    give_up: Callable[[], bool] | None
    on_retry: Callable[[Exception], None] | None


def retry(call: Callable[[int], Result], budget: RetryBudget, **rules: Unpack[RetryRules]) -> Result:
    """Return the result of the first `call(attempt)` that does not raise; attempts are counted from 0.

    on: error types that lead to another attempt (default: any Exception); any other error is raised at once.
    unless: error types that are raised at once, although `on` includes them (default: none).
    give_up: if it returns true after a failure, the last attempt's error is raised, as when the budget is spent.
    on_retry: called before the pause with each error that another attempt follows, to log or count it.
    """
    attempts = itertools.count()
    return tenacity.Retrying(**_tenacity_settings(budget, **rules))(lambda: call(next(attempts)))


async def retry_async(
    call: Callable[[int], Awaitable[Result]], budget: RetryBudget, **rules: Unpack[RetryRules]
) -> Result:
    """Retry a coroutine function like `retry`. Pauses do not block the event loop and end if the task is cancelled."""
    attempts = itertools.count()

    async def attempt() -> Result:
        return await call(next(attempts))

    return await tenacity.AsyncRetrying(**_tenacity_settings(budget, **rules))(attempt)


def wait_until(condition: Callable[[], Result], timeout_s: float, poll_s: float) -> Result:
    """Call `condition` every `poll_s`. Return the first true value, or the last, false value after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(poll_s)
    return result


def look_again_s(waited_s: float) -> float:
    """Return the pause until the next check of a file that another process will write, after a wait of `waited_s`.

    It is a hundredth of the wait, between 5 and 100 ms, so polling lengthens the wait by about 1 %. Short waits are
    noticed at once, and long waits load the cores and a shared file system little.
    """
    return min(max(0.005, waited_s / 100), 0.1)


def _tenacity_settings(
    budget: RetryBudget,
    on: Errors = Exception,
    unless: Errors = (),
    give_up: Callable[[], bool] | None = None,
    on_retry: Callable[[Exception], None] | None = None,
) -> dict[str, Any]:
    stops: list[Any] = [] if give_up is None else [lambda _state: give_up()]
    if budget.attempts is not None:
        stops.append(tenacity.stop_after_attempt(budget.attempts))
    if budget.timeout_s is not None:
        stops.append(tenacity.stop_before_delay(budget.timeout_s))
    pauses = tenacity.wait_random_exponential if budget.jitter else tenacity.wait_exponential
    return {
        "stop": tenacity.stop_any(*stops),
        "wait": pauses(multiplier=budget.first_pause_s, max=budget.longest_pause_s),
        "retry": tenacity.retry_if_exception(lambda error: isinstance(error, on) and not isinstance(error, unless)),
        "before_sleep": None if on_retry is None else lambda state: on_retry(state.outcome.exception()),
        "reraise": True,  # the last attempt's error, which callers handle, instead of `RetryError`
    }
