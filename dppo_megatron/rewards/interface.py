"""What a reward is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from dppo_megatron.types import Prompt


@runtime_checkable
class Reward(Protocol):
    """Any callable that values one response.

    `prompt.answer` is the answer column, `prompt.columns` the whole source row; `response_text` is what
    followed the prompt, special tokens removed. Returns a finite number. Raising, a value that is not finite,
    or exceeding `reward.timeout_s` scores the sample as failed: it carries no loss. It may be async.

    It runs in worker processes, so it should depend on its arguments alone. A callable with the attribute
    `trusted = True` promises to return within microseconds and runs in the calling process, without a
    timeout.
    """

    def __call__(self, prompt: Prompt, response_text: str) -> float: ...
