"""Retries: how often, how long, after which errors, and the last error; waiting for a condition."""

import asyncio
import time

import pytest

from dppo_megatron.common.retry import RetryBudget, look_again_s, retry, retry_async, wait_until


class Busy(Exception):
    pass


class Refused(Busy):
    pass


class Flaky:
    """Raises the given errors in turn, then returns the number of the attempt."""

    def __init__(self, *errors: Exception):
        self.errors = list(errors)
        self.attempts: list[int] = []

    def __call__(self, attempt: int) -> int:
        self.attempts.append(attempt)
        if self.errors:
            raise self.errors.pop(0)
        return attempt

    async def coroutine(self, attempt: int) -> int:
        await asyncio.sleep(0)
        return self(attempt)


def run_async(flaky, budget, **rules):
    return asyncio.run(retry_async(flaky.coroutine, budget, **rules))


both = pytest.mark.parametrize("run", [retry, run_async])


@both
def test_the_first_attempt_that_succeeds_gives_the_result(run):
    flaky, seen = Flaky(Busy("1"), Busy("2")), []
    assert run(flaky, RetryBudget(attempts=3), on=Busy, on_retry=seen.append) == 2
    assert flaky.attempts == [0, 1, 2]
    assert [str(error) for error in seen] == ["1", "2"]


@both
def test_the_last_error_is_raised_when_the_attempts_are_spent(run):
    flaky, seen = Flaky(*(Busy(str(number)) for number in range(9))), []
    with pytest.raises(Busy, match=r"^2$"):
        run(flaky, RetryBudget(attempts=3), on_retry=seen.append)
    assert len(seen) == 2  # none follows the third


@both
@pytest.mark.parametrize("error", [Refused("no"), KeyError("bug")])
def test_other_errors_are_raised_at_once(run, error):
    flaky = Flaky(error)
    with pytest.raises(type(error)):
        run(flaky, RetryBudget(attempts=3), on=Busy, unless=Refused)
    assert flaky.attempts == [0]


@both
def test_no_attempt_begins_after_the_time(run):
    flaky = Flaky(*(Busy(str(number)) for number in range(99)))
    started = time.monotonic()
    with pytest.raises(Busy):
        run(flaky, RetryBudget(timeout_s=2.0, first_pause_s=0.4))
    assert flaky.attempts == [0, 1, 2]  # at 0, 0.4 and 1.2; the next would be at 2.8
    assert 1.2 <= time.monotonic() - started < 2.8


@both
def test_giving_up_raises_the_error(run):
    flaky = Flaky(Busy("1"), Busy("2"))
    with pytest.raises(Busy, match="2"):
        run(flaky, RetryBudget(attempts=9), give_up=lambda: len(flaky.attempts) == 2)


def test_jitter_shortens_pauses():
    flaky = Flaky(*(Busy(str(number)) for number in range(20)))
    started = time.monotonic()
    assert retry(flaky, RetryBudget(attempts=21, first_pause_s=0.05, longest_pause_s=0.1, jitter=True)) == 20
    assert 0 < time.monotonic() - started < 20 * 0.1


def test_a_pause_ends_when_its_task_is_cancelled():
    async def main():
        task = asyncio.create_task(retry_async(Flaky(Busy()).coroutine, RetryBudget(attempts=2, first_pause_s=600)))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(main(), 10))


def test_waiting_returns_the_first_true_value_or_the_last_false_one():
    values = iter([None, 0, "ready", "later"])
    assert wait_until(lambda: next(values), timeout_s=60, poll_s=0.01) == "ready"
    started = time.monotonic()
    assert wait_until(lambda: 0, timeout_s=0.1, poll_s=0.02) == 0
    assert 0.1 <= time.monotonic() - started < 5
    with pytest.raises(KeyError):
        wait_until(lambda: {}["x"], timeout_s=60, poll_s=0.01)


def test_a_budget_has_a_bound():
    with pytest.raises(ValueError, match="attempts, timeout_s or both"):
        RetryBudget()


def test_a_look_at_a_file_comes_soon_at_first_and_adds_a_hundredth_to_a_long_wait():
    assert look_again_s(0.0) == 0.005
    assert look_again_s(3.0) == pytest.approx(0.03)
    assert look_again_s(3600.0) == 0.1
