"""Rewrite an answer's characters and notations as LaTeX that math-verify reads."""

from __future__ import annotations

import re
from fractions import Fraction
from unicodedata import normalize

_COMMANDS = re.findall("([^a-z ])([a-z]+)", "×times ·cdot ±pm ∞infty πpi θtheta ≤le ≥ge ≠ne ∪cup ∩cap ∈in ∅emptyset")
_CHARACTERS = str.maketrans(
    {"÷": "/", "\u2044": "/", "°": r"^\circ ", "√": r"\sqrt", "｛": r"\{", "｝": r"\}", "′": "'"}
    | {character: f"\\{name} " for character, name in _COMMANDS}
    | dict.fromkeys("€£¥₹", "")
    | dict.fromkeys("\u2212\u2013\u2010\u2011", "-")
)
_THIN_GROUPS = re.compile(r"(?<=[0-9])[\u00a0\u2007-\u200a\u202f](?=[0-9]{3}(?![0-9]))")
_RAISED = re.compile("([¼-¾⅐-⅞])|[²³¹⁰-⁹⁺⁻ⁿ]+")
_ZEROS = {"thousand": 3, "million": 6, "billion": 9}
_LETTER = r"(?<![A-Za-z])([A-Za-z])"
_REWRITTEN = (  # patterns, applied in this order
    (r"\\?(?<![A-Za-z])sqrt(?:\(([^()]*)\)|([0-9]{2,}))", r"\\sqrt{\1\2}"),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
    (r"\*\*", "^"),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
    (r"\\langle(.*)\\rangle", r"(\1)"),  # math-verify reads <1,2> as 1.2
    (r"(\\circ\s*\}?)\s*[CF]\b", r"\1"),
    (r"^\\text\s*\{[^{}0-9]*:\s*\}", ""),
    (r"^(?:\\(?:text|mathrm|textbf)\s*\{)?\s*\(([A-J])\)[\s}\\]+[^A-Z]*$", r"\1"),  # a choice and its content
    # math-verify reads 5\,000 as 5 * 000 and 2 3/4 as a sum.
    (r"(?<=[0-9])(?:,?\\[,!;: ]|~|\{,\}| )(?=[0-9]{3}(?![0-9/]))", ""),
    (r"(?<![0-9/.^_])([0-9]+) +([0-9]+)/([0-9]+)(?![0-9/])", r"\1\\frac{\2}{\3}"),
    (r"(?<=[0-9])\s*(?:\*|x|\\times|\\cdot)\s*10\s*\^\s*[({]?([-+]?[0-9]+)[)}]?", r"\\times 10^{\1}"),
    # math-verify drops primes and transposition, and reads dy/dx as a quotient.
    (r"(?<![A-Za-z])d([A-Za-z])/d([A-Za-z])(?![A-Za-z])", r"\\frac{d\1}{d\2}"),
    (_LETTER + r"'(?![A-Za-z'])", r"\1_{prime}"),
    (_LETTER + r"''(?![A-Za-z'])", r"\1_{second}"),
    (r"(?<![A-Za-z])([A-DF-Z])\^(?:T(?![A-Za-z])|\{T\})", r"\1_{T}"),
)
_MAGNITUDE = re.compile(r"(?<=[0-9])\s*((?:\\text\s*\{)?)\s*(thousand|million|billion)\b")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*(?:\{([0-9]+)\}|([0-9]))")
_SCIENTIFIC = re.compile(
    r"(?<![A-Za-z0-9.\\])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([-+]?[0-9]{1,4})(?![A-Za-z0-9.^_({\\])"
)


def latin(text: str) -> str:
    """Replace full-width digits, minus signs, thin spaces, superscripts and symbols. Linear in the text."""
    text = _RAISED.sub(_lowered, _THIN_GROUPS.sub("", text))
    return text if text.isascii() else normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)


def standard(answer: str) -> str:
    r"""Rewrite digit groups, mixed numbers, repeating decimals: `2 3/4` as `2\frac{3}{4}`, `0.1\overline{6}` as 1/6."""
    for pattern, new in _REWRITTEN:
        answer = re.sub(pattern, new, answer)
    answer = _MAGNITUDE.sub(lambda match: rf"\times 10^{_ZEROS[match[2]]} {match[1]}", answer)
    return _REPEATING.sub(_as_fraction, answer)


def scientific(answer: str) -> str:
    r"""Rewrite `1.6e-19` as `1.6 \times 10^{-19}`. `2e-1` may also mean `2e - 1`, so callers compare both."""
    return _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", answer)


def _lowered(match: re.Match[str]) -> str:
    text = normalize("NFKC", match[0])
    return "\\frac{{{}}}{{{}}}".format(*text.split("\u2044")) if match[1] else f"^{{{text}}}"


def _as_fraction(match: re.Match[str]) -> str:
    whole, fixed, cycle = match[1], match[2], match[3] or match[4]
    value = Fraction(int(whole + fixed + cycle) - int(whole + fixed or 0), 10 ** len(fixed) * (10 ** len(cycle) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
