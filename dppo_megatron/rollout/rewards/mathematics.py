"""Compare mathematical answers with math-verify: numbers, expressions, intervals, sets, tuples, matrices."""

from __future__ import annotations

import functools
import logging
import math
import re
from fractions import Fraction
from functools import partial
from itertools import starmap
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Abs, Derivative, Float, MatrixBase, Symbol, log

from dppo_megatron.errors import shown
from dppo_megatron.types import Prompt

from .extract import boxes, depth, last_answer
from .interface import Ungradable
from .notation import latin, scientific, standard

# math-verify would warn that its timeouts are off: its signals work only in a main thread. The pool has timeouts.
logging.getLogger("math_verify").setLevel(logging.ERROR)

LONGEST = 512  # characters of an answer; the longest in MATH has 159
PLACES = 6  # decimal places that are compared
DEEPEST = 10  # levels of braces; each level multiplies the parser's time
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([0-9]+)\}\s*\{([0-9]+)\}")
_SIGN = re.compile(r"\s*([-+/])\s*")
_NUMBER = re.compile(r"[-+]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+|[0-9]+/[0-9]+)")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_PERCENT = re.compile(r"^([-+]?[1-9][0-9]*(?:\.[0-9]+)?)\s*\\?%$")
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}|([A-Za-z' -]*[A-Za-z]{4}[A-Za-z' -]*)")
_FUNCTIONS = re.compile(r"(?i)\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|max|min|gcd|lcm)\b")
_BY_MATH_VERIFY = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


class Math:
    """Returns 1.0 if the last `\\boxed{}` or `Answer:` line in the response equals the answer column, else 0.0.

    math-verify compares them: LaTeX or plain, fractions, roots, intervals, sets in any order, tuples, matrices,
    equations by value, units left out, `28\\%` also as 28; decimals to six places, and to six significant digits below
    0.001. `dy/dx`, `y'` and congruences are not numbers. Words are compared as text.
    An answer longer than 512 characters or deeper than 10 braces is wrong. An answer with long algebra exceeds
    reward.timeout_s and fails.
    """

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        answer = last_answer(response_text, LONGEST)
        if answer is None:
            return 0.0
        try:
            self.check_answer(prompt.answer)
        except ValueError as error:
            raise Ungradable(str(error)) from error
        return float(equal(prompt.answer, answer))

    def final_answer(self, response_text: str) -> str | None:
        answer = last_answer(response_text, LONGEST)
        return None if answer is None else _one_spelling(plain(answer))

    def check_answer(self, answer: str) -> None:
        parsed = _parsed(plain(answer))
        if not parsed or "####" in answer or (isinstance(parsed[0], str) and not _word(plain(answer))):
            raise ValueError(f"the answer {shown(answer)} is not a number, expression or word that can be compared")


def equal(gold: str, answer: str) -> bool:
    """Return whether two answers, in forms that `Math` accepts, are equal."""
    gold, answer = plain(gold), plain(answer)
    if gold == answer:
        return bool(gold)
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer) and max(len(gold), len(answer)) <= LONGEST:
        return int(gold) == int(answer)
    if _word(gold) or _word(answer):
        return (_word(gold) or _letters(gold)) == (_word(answer) or _letters(answer))
    if "\\equiv" in gold + answer:  # math-verify would compare the moduli only
        return gold.replace(" ", "") == answer.replace(" ", "")
    pairs = dict.fromkeys(
        (convert(gold), convert(answer)) for convert in (scientific, str, partial(_PERCENT.sub, r"\1"))
    )
    return any(starmap(_same_value, pairs))


def _same_value(gold: str, answer: str) -> bool:
    """Return whether math-verify equates two answers, even at the precision of their smallest number."""
    first, second = list(_parsed(gold)), list(_parsed(answer))
    if not (first and second and verify(first, second, timeout_seconds=None)):
        return False
    places = max(_places(first[0]), _places(second[0]))
    return places == PLACES or (places < 1000 and verify(first, second, places, places + 9, timeout_seconds=None))


def _places(value: Any) -> int:
    """Return the decimal places that give each number in a parsed answer six significant digits; at least `PLACES`."""
    if not getattr(value, "is_number", False):
        parts = value.flat() if isinstance(value, MatrixBase) else getattr(value, "args", ())
        return max(map(_places, parts), default=PLACES)
    size = Abs(value).evalf(5)
    return PLACES - math.floor(log(size, 10)) if isinstance(size, Float) and 0 < size < 1e-3 else PLACES


def plain(answer: str) -> str:
    """Return an answer without surrounding dollar signs, a box, a final period or Markdown, in standard notation."""
    answer = latin(answer).replace("\\$", "").strip()
    for _ in range(4):  # the surroundings may be nested in any order
        previous = answer
        answer = answer.removesuffix(".").strip() if not answer.endswith("..") else answer
        for start, end in _WRAPPERS:
            inside = answer[len(start) : -len(end)]
            if len(answer) > len(start + end) and answer.startswith(start) and answer.endswith(end):
                answer = answer if start in inside else inside.strip()
        if answer.startswith("\\boxed") and len(answer) <= 2 * LONGEST:
            contents = [content for place, content in boxes(answer, LONGEST) if place == 0]
            answer = contents[0].strip() if contents and answer.endswith("}") else answer
        if answer == previous:
            break
    return standard(answer) if len(answer) <= LONGEST else answer


def _one_spelling(answer: str) -> str:
    """Return the same text for equal integers, fractions or finite decimals; other answers are unchanged."""
    text = _SIGN.sub(r"\1", _FRACTION.sub(r"\1/\2", answer))
    try:
        return str(Fraction(text.replace(",", ""))) if _NUMBER.fullmatch(text) else answer
    except ZeroDivisionError:
        return answer


def _word(answer: str) -> str | None:
    """Return an answer that is words in lower case, else None: math-verify reads bare words as products of letters."""
    match = _WORDS.fullmatch(answer)
    if match is None or (match[2] and _FUNCTIONS.search(answer)):
        return None
    return _letters(match[1] if match[1] is not None else match[2])


def _letters(answer: str) -> str | None:
    """Return the letters of a text in lower case, or None if it contains mathematics."""
    if re.search(r"[0-9\\^_=+*/<>|{}\[\]]", answer):
        return None
    return " ".join(re.sub(r"[^A-Za-z ]", " ", answer).lower().split()) or None


@functools.lru_cache(maxsize=4096)
def _parsed(answer: str) -> tuple[Any, ...]:
    """Parse an answer with math-verify; return an empty tuple if the answer is empty, too long or too deep."""
    if not answer or len(answer) > LONGEST or depth(answer) > DEEPEST:
        return ()
    if _word(answer):
        return (answer,)
    text = answer if "$" in answer else f"${answer}$"
    if answer.count("{") == answer.count("}") and "$" not in answer:
        text = f"\\boxed{{{answer}}}"
    return tuple(map(_opaque, parse(text, extraction_config=_BY_MATH_VERIFY, parsing_timeout=None)))


def _opaque(part: Any) -> Any:
    """Return the parsed answer with a symbol for dy/dx, which algebra would make 0 because y does not contain x."""
    if isinstance(part, str) or not part.has(Derivative):
        return part
    return part.replace(lambda e: isinstance(e, Derivative) and not e.expr.has(*e.variables), lambda e: Symbol(str(e)))
