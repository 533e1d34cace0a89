"""Define the interface of rewards."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, runtime_checkable

from dppo_megatron.types import Prompt


@runtime_checkable
class Reward(Protocol):
    """Scores a response.

    `prompt.answer` is the answer column and `prompt.columns` the whole source row. `response_text` is the text after
    the prompt without special tokens. Returns a finite number, or `NOT_APPLICABLE`. If it raises, returns a non-finite
    value, or exceeds `reward.timeout_s`, the sample fails and carries no loss. It may be async.

    It runs in worker processes, so it should depend only on the arguments. A callable with the attribute
    `trusted = True` promises to return within microseconds; it runs in the calling process, without a timeout.

    Optional methods:

    - `check_answer(answer)` raises ValueError for answers that the reward cannot compare with. Such answers are
      reported by line before a run begins.
    - `final_answer(response_text)` returns the answer in the response as text, or None. Evaluations count it as a vote
      in maj@n.
    """

    def __call__(self, prompt: Prompt, response_text: str) -> Any: ...


@runtime_checkable
class GroupReward(Protocol):
    """Scores all responses to a prompt at once. It runs in the calling process, where it may wait but not compute.

    Returns a number for each response, or None if a response has no reward. If it raises, all responses fail.
    """

    def score_group(self, prompt: Prompt, texts: Sequence[str], timeout_s: float) -> Awaitable[list[float | None]]: ...


class NotApplicable:
    """A term returns this if it does not score the row; the other terms give the reward."""


NOT_APPLICABLE = NotApplicable()


class Ungradable(ValueError):
    """The grader cannot decide whether the response is right, so the sample fails and carries no loss."""
