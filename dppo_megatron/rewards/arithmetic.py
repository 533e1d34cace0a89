"""Score exact integers, for arithmetic prompts such as `12+30=`."""

from __future__ import annotations

import re

from dppo_megatron.errors import shown
from dppo_megatron.types import Prompt

_INTEGER = re.compile(r"-?[0-9]+")


def arithmetic(prompt: Prompt, response_text: str) -> float:
    """Return 1.0 if the response, without surrounding space, is the integer of the answer column as written, else 0.0.

    Raises `ValueError` when the answer column is not an integer.
    """
    check_answer(prompt.answer)
    return float(response_text.strip() == prompt.answer.strip())


def check_answer(answer: str) -> None:
    """Raise `ValueError` unless the answer is an integer."""
    if not _INTEGER.fullmatch(answer.strip()):
        raise ValueError(f"the answer {shown(answer.strip())} is not an integer")


arithmetic.check_answer = check_answer
arithmetic.final_answer = str.strip
arithmetic.trusted = True  # one string comparison: see interface.Reward
