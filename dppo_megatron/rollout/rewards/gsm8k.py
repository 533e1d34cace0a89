"""Score grade-school word problems: compare the final number after `####` or in `\\boxed{}` by math-verify."""

from __future__ import annotations

import re
from decimal import Decimal

from dppo_megatron.errors import shown
from dppo_megatron.types import Prompt

from .extract import boxes, depth
from .mathematics import equal
from .notation import latin

_LONGEST = 256  # characters of an answer; a number is shorter
_DEEPEST = 5  # levels of braces; each level multiplies the parser's time
# Digits with all thousands separators or none: 5,5 is not a number.
_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
# A number is rejected if an expression follows (72/2 is not 72) or if it numbers a heading (`#### 2. Solve`). Blanks
# match in a single way, because several ways would take cubic time over many blanks.
_MARKED = re.compile(
    rf"####\s*(?P<number>(?:[-+]\s*)?(?:\\?\$\s*)?[-+]?{_DIGITS})"
    r"(?![.,]?[0-9]|[eE][0-9]|\s*[-+*/^=]\s*[0-9$(\\]|[.):][^\S\n]*[^\s*$])"
)
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_THOUSANDS = re.compile(r"(?<![0-9.])(?<!(?<!\\),)[0-9]{1,3}(?:(?:,|\{,\}|\\,)[0-9]{3})+(?![0-9])")


def final_answer(text: str) -> str | None:
    """Return the last number in a documented form, without separators and units, or None without such a number."""
    text = latin(text)
    candidates = [(match.start(), match["number"]) for match in _MARKED.finditer(text)]
    candidates += boxes(text, _LONGEST)
    return _plain(max(candidates)[1]) if candidates else None


def _gold(answer: str) -> Decimal:
    number = _plain(latin(answer).rpartition("####")[2])
    if not _NUMBER.fullmatch(number):
        raise ValueError(f"the answer column ends in {shown(number)}, expected `#### number`")
    return Decimal(number)


def _plain(text: str) -> str:
    for sign in ("\\$", "$", "\\%", "%", "\\!"):
        text = text.replace(sign, "")
    text = _THOUSANDS.sub(lambda match: re.sub("[^0-9]", "", match[0]), text)
    return text.replace("\\,", " ").strip().removesuffix(".").strip()


def _equal(gold: Decimal, answer: str) -> bool:
    if len(answer) > _LONGEST or depth(answer) > _DEEPEST or "," in answer:  # a list is not a number
        return False
    if _NUMBER.fullmatch(answer):
        return Decimal(answer) == gold
    return equal(str(gold), answer)


class Gsm8k:
    """Returns 1.0 if the response's final number equals the number in the answer column, else 0.0.

    The final number is a number after `####`, or the content of `\\boxed{}`; the last of several counts. A number
    anywhere else scores 0. Thousands separators, `$` and `%` are ignored on both sides. The answer column ends in
    `#### number`, as in GSM8K, or is only a number; raises `ValueError` otherwise.
    """

    final_answer = staticmethod(final_answer)
    check_answer = staticmethod(_gold)

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        gold, answer = _gold(prompt.answer), final_answer(response_text)
        return 0.0 if answer is None else float(_equal(gold, answer))


gsm8k = Gsm8k()
