"""Compare answers as text: exactly, by a user's pattern, or by a choice letter."""

from __future__ import annotations

import re

from dppo_megatron.types import Prompt

from .extract import last_answer

_LONGEST = 512  # characters of an answer


class ExactMatch:
    """Returns 1.0 if the response, without surrounding space, equals the answer column, else 0.0."""

    def __init__(self, ignore_case: bool = False):
        self._ignore_case = ignore_case

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        return float(self.final_answer(response_text) == self._plain(prompt.answer))

    def final_answer(self, response_text: str) -> str | None:
        return self._plain(response_text)

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self._ignore_case else text.strip()


class Regex(ExactMatch):
    """Returns 1.0 if the last match of `pattern` in the response equals the answer column, else 0.0.

    If the pattern has a group, the group is compared, without surrounding space.
    """

    def __init__(self, pattern: str, ignore_case: bool = False):
        super().__init__(ignore_case)
        try:
            self._pattern = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
        except (re.error, TypeError) as error:
            raise ValueError(f"pattern is not a regular expression: {error}") from error

    def final_answer(self, response_text: str) -> str | None:
        matches = list(self._pattern.finditer(response_text))
        if not matches:
            return None
        return self._plain(matches[-1][1] or "" if self._pattern.groups else matches[-1][0])


class MultipleChoice:
    """Returns 1.0 if the last `\\boxed{}` or `Answer:` line in the response names the answer column's choice, else 0.0.

    A letter names a choice: `B`, `(B)`, `B.`, `B) because`, `\\text{B}`, in upper or lower case. The answer column may
    use these forms, too. `choices`: the valid letters.
    """

    def __init__(self, choices: str = "ABCDEFGHIJ"):
        if not isinstance(choices, str) or not choices.isalpha() or len(set(choices.upper())) < len(choices):
            raise ValueError(f"choices = {choices!r}: expected different letters, such as ABCD")
        self._letter = re.compile(
            rf"(?i)(?:\\(?:text|mathrm|mathbf|textbf)\s*\{{)?\s*[(\[$*]*([{choices}])\s*(?:$|[.,;:)\]}}$*-])"
        )

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        answer = self.final_answer(response_text)
        return float(answer is not None and answer == self._gold(prompt.answer))

    def final_answer(self, response_text: str) -> str | None:
        answer = last_answer(response_text, _LONGEST)
        return None if answer is None else self._choice(answer)

    def check_answer(self, answer: str) -> None:
        self._gold(answer)

    def _gold(self, answer: str) -> str:
        letter = self._choice(answer)
        if letter is None:
            raise ValueError(f"the answer {answer[:80]!r} is none of the choices")
        return letter

    def _choice(self, text: str) -> str | None:
        match = self._letter.match(text.strip())
        return None if match is None else match[1].upper()
