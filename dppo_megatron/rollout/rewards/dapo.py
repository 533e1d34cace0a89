"""Score with DAPO's verifier (arXiv 2503.14476): compare the `Answer:` line as text after Minerva's normalization."""

from __future__ import annotations

import re

from dppo_megatron.types import Prompt

_READ = 300  # characters searched at the response end
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
# These are removed from an answer, in this order: Minerva (arXiv 2206.14858), appendix D.1.
_UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_UNWRAPPED = tuple(re.compile(rf"(\\{name}\{{)({inside})(\}})") for name, inside in [
    ("text", ".*?"), ("textbf", ".*?"), ("overline", ".*?"), ("boxed", ".*"),
])  # fmt: skip


class Dapo:
    """Returns 1.0 if the last `Answer:` line within the last 300 characters equals the answer column, else `wrong`.

    Both are normalized as in DAPO's verifier: the part after the last `=`, without units, `$` and blanks. They are
    compared as text, so 1/2 is not 0.5. DAPO trains with `wrong` = -1; with the default 0 the mean reward is an
    accuracy.
    """

    def __init__(self, wrong: float = 0.0):
        self._wrong = float(wrong)

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        answer = self.final_answer(response_text)
        return 1.0 if answer is not None and answer == normal_form(prompt.answer) else self._wrong

    def final_answer(self, response_text: str) -> str | None:
        matches = _ANSWER.findall(response_text[-_READ:])
        return normal_form(matches[-1]) if matches else None

    def check_answer(self, answer: str) -> None:
        if not normal_form(answer) or "####" in answer:
            raise ValueError("the answer is empty without its units and signs, or a whole solution")


def normal_form(answer: str) -> str:
    """Return the normalized answer text: `x = 1,000 dollars` gives `1000`."""
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for unit in _UNITS:
        answer = answer.replace(unit, "")
    if (first := answer.find("$")) >= 0 and (second := answer.find("$", first + 1)) >= 0:
        answer = answer[first : second + 1]
    for command in _UNWRAPPED:
        answer = command.sub(r"\2", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    digits = answer.replace(",", "")
    return digits.strip() if digits.isdigit() else answer.strip()
