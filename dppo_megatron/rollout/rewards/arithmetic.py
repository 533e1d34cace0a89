"""Score exact integers, for arithmetic prompts such as `12+30=`."""

from __future__ import annotations

import re

from dppo_megatron.errors import shown
from dppo_megatron.types import Prompt

_INTEGER = re.compile(r"-?[0-9]+")


class Arithmetic:
    """Returns 1.0 if the response, without surrounding space, is the integer in the answer column as written, else 0.0.

    Raises `ValueError` when the answer column is not an integer.
    """

    trusted = True  # one string comparison: see interface.Reward
    final_answer = staticmethod(str.strip)

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        self.check_answer(prompt.answer)
        return float(response_text.strip() == prompt.answer.strip())

    def check_answer(self, answer: str) -> None:
        """Raise `ValueError` unless the answer is an integer."""
        if not _INTEGER.fullmatch(answer.strip()):
            raise ValueError(f"reward arithmetic: the answer {shown(answer.strip())} is not an integer")


arithmetic = Arithmetic()
