"""Exact integers, for arithmetic prompts such as `12+30=`."""

from __future__ import annotations

import re

from dppo_megatron.types import Prompt

_INTEGER = re.compile(r"-?[0-9]+")


def arithmetic(prompt: Prompt, response_text: str) -> float:
    """1.0 when the response without surrounding space is the integer of the answer column, written the same.

    Else 0.0.

    Raises `ValueError` when the answer column is not an integer.
    """
    answer = prompt.answer.strip()
    if not _INTEGER.fullmatch(answer):
        raise ValueError(f"the answer {answer!r} is not an integer")
    return float(response_text.strip() == answer)


arithmetic.trusted = True  # one string comparison: see interface.Reward
