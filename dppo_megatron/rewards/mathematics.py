"""Answers of mathematics: numbers, expressions, intervals, sets, tuples, matrices; compared by math-verify."""

from __future__ import annotations

import functools
import logging
import re
from fractions import Fraction
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from dppo_megatron.errors import shown
from dppo_megatron.types import Prompt

from .extract import boxes, depth, last_answer
from .interface import Ungradable

# It warns once that its timeouts are off: they are signals, which work in a main thread alone. The pool's holds.
logging.getLogger("math_verify").setLevel(logging.ERROR)

LONGEST = 512  # characters of an answer; of MATH the longest has 159
DEEPEST = 10  # levels of braces; the parser's time grows by a factor with each
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([0-9]+)\}\s*\{([0-9]+)\}")
_SIGN = re.compile(r"\s*([-+/])\s*")
_NUMBER = re.compile(r"[-+]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+|[0-9]+/[0-9]+)")
_INTEGER = re.compile(r"[-+]?[0-9]+")
# math-verify would read 5\,000 as 5 * 000.
_SPACE_IN_NUMBER = re.compile(r"(?<=[0-9])(?:\\[,!;: ]|~|\{,\})(?=[0-9]{3}(?![0-9]))")
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}|([A-Za-z' -]*[A-Za-z]{4}[A-Za-z' -]*)")
_FUNCTIONS = re.compile(r"(?i)\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|max|min|gcd|lcm)\b")
_BY_MATH_VERIFY = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


class Math:
    """1.0 when the last `\\boxed{}` or `Answer:` line of the response equals the answer column, else 0.0.

    As math-verify compares: LaTeX or plain, fractions, roots, intervals, sets whatever their order, tuples, matrices,
    equations by their value, units left out, `28\\%` also as 28; decimals to six digits. Words are compared as text.
    An answer longer than 512 characters or deeper than 10 braces is wrong. One that keeps the algebra busy runs into
    reward.timeout_s and fails.
    """

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        found = last_answer(response_text, LONGEST)
        if found is None:
            return 0.0
        try:
            self.check_answer(prompt.answer)
        except ValueError as error:
            raise Ungradable(str(error)) from error
        return float(equal(prompt.answer, found))

    def final_answer(self, response_text: str) -> str | None:
        found = last_answer(response_text, LONGEST)
        return None if found is None else _one_spelling(plain(found))

    def check_answer(self, answer: str) -> None:
        parsed = _parsed(plain(answer))
        if not parsed or (isinstance(parsed[0], str) and not _word(plain(answer))):
            raise ValueError(f"the answer {shown(answer)} is no number, expression or word that can be compared")


def equal(gold: str, found: str) -> bool:
    """Whether two answers, of the forms of `Math`, are the same."""
    gold, found = plain(gold), plain(found)
    if gold == found:
        return bool(gold)
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(found) and max(len(gold), len(found)) <= LONGEST:
        return int(gold) == int(found)
    if _word(gold) or _word(found):
        return (_word(gold) or _letters(gold)) == (_word(found) or _letters(found))
    first, second = _parsed(gold), _parsed(found)
    return bool(first and second and verify(list(first), list(second), timeout_seconds=None))


def plain(answer: str) -> str:
    """Without what only surrounds an answer: dollar signs, a box, a final period, Markdown."""
    answer = answer.replace("\\$", "").strip()
    for _ in range(4):  # in whatever order they are put around each other
        before = answer
        answer = answer.removesuffix(".").strip() if not answer.endswith("..") else answer
        for start, end in _WRAPPERS:
            inside = answer[len(start) : -len(end)]
            if len(answer) > len(start + end) and answer.startswith(start) and answer.endswith(end):
                answer = answer if start in inside else inside.strip()
        if answer.startswith("\\boxed") and len(answer) <= 2 * LONGEST:
            whole = [content for place, content in boxes(answer, LONGEST) if place == 0]
            answer = whole[0].strip() if whole and answer.endswith("}") else answer
        if answer == before:
            break
    return _SPACE_IN_NUMBER.sub("", answer) if len(answer) <= LONGEST else answer


def _one_spelling(answer: str) -> str:
    """Of an integer, a fraction or a finite decimal: the same text for the same number. Others stay as they are."""
    text = _SIGN.sub(r"\1", _FRACTION.sub(r"\1/\2", answer))
    try:
        return str(Fraction(text.replace(",", ""))) if _NUMBER.fullmatch(text) else answer
    except ZeroDivisionError:
        return answer


def _word(answer: str) -> str | None:
    """Text in lower case, when the answer is words: math-verify takes bare ones for products of letters."""
    match = _WORDS.fullmatch(answer)
    if match is None or (match[2] and _FUNCTIONS.search(answer)):
        return None
    return _letters(match[1] if match[1] is not None else match[2])


def _letters(answer: str) -> str | None:
    """The letters of a text, in lower case; none where there is anything of mathematics in it."""
    if re.search(r"[0-9\\^_=+*/<>|{}\[\]]", answer):
        return None
    return " ".join(re.sub(r"[^A-Za-z ]", " ", answer).lower().split()) or None


@functools.lru_cache(maxsize=4096)
def _parsed(answer: str) -> tuple[Any, ...]:
    """What math-verify reads in an answer; nothing for one that is empty, too long or too deep."""
    if not answer or len(answer) > LONGEST or depth(answer) > DEEPEST:
        return ()
    if _word(answer):
        return (answer,)
    text = answer if "$" in answer else f"${answer}$"
    if answer.count("{") == answer.count("}") and "$" not in answer:
        text = f"\\boxed{{{answer}}}"
    return tuple(parse(text, extraction_config=_BY_MATH_VERIFY, parsing_timeout=None))
