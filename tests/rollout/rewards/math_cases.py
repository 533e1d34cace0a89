"""Cases for the grader `math`: (answer column, answer in the response, right), from the tables in this folder.

A line of the table: format of the answer, 1 for right and 0 for wrong, answer column, answer in the response. Formats
and verdicts follow math-verify's published examples (github.com/huggingface/Math-Verify, tests). Every case is compared
with math-verify itself, except for those of the format `beyond`, where the grader is meant to be better.
"""

from pathlib import Path

Case = tuple[str, str, bool]


def read_table(name: str) -> list[tuple[str, Case]]:
    """Return (format or category, case) of each line."""
    lines = (line.split("\t") for line in Path(__file__).with_name(name).read_text().splitlines())
    return [(kind, (answer, given, right == "1")) for kind, right, answer, given in lines]


AGREED = [case for kind, case in read_table("math_cases.tsv") if kind != "beyond"]
BEYOND = [case for kind, case in read_table("math_cases.tsv") if kind == "beyond"]
# As a teacher would judge, by category; every category has near misses.
JUDGED = [case for _, case in read_table("judged_pairs.tsv")]
MISJUDGED = {  # judged otherwise by the grader, and no others
    (r"5\text{ cm}", r"5\text{ m}"),  # units are left out
    (r"\text{No solution}", "no solutions"),
    ("zero", "0"),
}
