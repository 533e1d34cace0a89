"""Cases for the grader `math`: (answer column, answer in the response, right), from `math_cases.tsv`.

A line of the table: format of the answer, 1 for right and 0 for wrong, answer column, answer in the response. Formats
and verdicts follow math-verify's published examples (github.com/huggingface/Math-Verify, tests). Every case is compared
with math-verify itself, except for those of the format `beyond`, where the grader is meant to be better.
"""

from __future__ import annotations

from pathlib import Path

AGREED: list[tuple[str, str, bool]] = []
BEYOND: list[tuple[str, str, bool]] = []
for _line in Path(__file__).with_suffix(".tsv").read_text().splitlines():
    _format, _right, _answer, _given = _line.split("\t")
    (BEYOND if _format == "beyond" else AGREED).append((_answer, _given, _right == "1"))
