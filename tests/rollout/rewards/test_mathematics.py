"""The grader `math` against math-verify itself, and against possible answers of a policy."""

import asyncio
import time

import pytest
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from dppo_megatron.config.schema import RewardConfig
from dppo_megatron.rollout.rewards import RewardPool, Ungradable
from dppo_megatron.rollout.rewards.extract import last_answer
from dppo_megatron.rollout.rewards.mathematics import Math, equal
from tests.attack import cases, generator
from tests.rollout.rewards import math_cases

BOTH = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]


def by_math_verify(answer: str, given: str) -> bool:
    gold = parse(f"${answer}$", BOTH, parsing_timeout=None)
    return verify(gold, parse(f"$\\boxed{{{given}}}$", BOTH, parsing_timeout=None), timeout_seconds=None)


@pytest.mark.parametrize(("answer", "given", "right"), math_cases.AGREED)
def test_the_grader_agrees_with_math_verify(answer, given, right):
    assert equal(answer, given) == by_math_verify(answer, given) == bool(right)


def test_judged_pairs():
    pairs = math_cases.JUDGED
    assert len({pair[:2] for pair in pairs}) == len(pairs) >= 160
    wrong = {(answer, given) for answer, given, right in pairs if equal(answer, given) != bool(right)}
    assert wrong == math_cases.MISJUDGED
    for answer, _, _ in pairs:
        Math().check_answer(answer)


@pytest.mark.parametrize(("answer", "given", "right"), math_cases.BEYOND)
def test_words_and_thin_spaces(answer, given, right):
    assert equal(answer, given) == bool(right)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{34}.", "34"), (r"\boxed{1}, no, \boxed{34}", "34"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {34}", "34"), (r"\boxed{\{1,2\}}", r"\{1,2\}"), (r"\boxed{\\{1,2\\}}", r"\\{1,2\\}"),
        (r"\boxed{\begin{pmatrix}1\\{2}\end{pmatrix}}", r"\begin{pmatrix}1\\{2}\end{pmatrix}"), (r"\\boxed{34}", "34"),
        ("Answer: 34", "34"), ("**Answer:** 34", "34"), ("**Answer: 34**", "34"), ("Final answer: $34$", "$34$"),
        ("The answer is: 34", "34"), ("answer:\n34", "34"), ("Answer: 1\nAnswer: 34\nDone.", "34"),
        (r"Answer: 1 \boxed{34}", "34"), (r"\boxed{1} Answer: 34", "34"), ("34", None), ("The answer is 34", None),
        (r"\boxed{34", None), ("", None),
    ],
)  # fmt: skip
def test_where_the_answer_stands(text, answer):
    assert last_answer(text, 512) == answer


@pytest.mark.parametrize(
    "text",
    [r"\boxed{$34$}", "Answer: $34$.", r"Answer: \(34\)", r"Answer: \[34\]", "Answer: **34**", r"Answer: $\boxed{34}$"],
)
def test_text_around_an_answer_does_not_count(prompt, text):
    assert Math()(prompt("34"), text) == 1
    assert Math()(prompt("$34$"), text) == 1
    assert Math()(prompt(r"\boxed{34}"), text) == 1
    assert Math()(prompt("35"), text) == 0


@pytest.mark.parametrize(
    ("spellings", "vote"),
    [
        (["25", "025", "+25", "$25$", r"\boxed{25}", "25.0", "50/2"], "25"),
        (["1/2", r"\frac{1}{2}", r"\dfrac{2}{4}", "0.5", ".50"], "1/2"),
        (["7425000", "7,425,000", "7{,}425{,}000", "7,425,000.0"], "7425000"), (["1,2"], "1,2"),
        ([r"-\frac{3}{4}", "-0.75", "-3/4", "- 0.75"], "-3/4"), (["1/0"], "1/0"), (["1 2"], "1 2"),
        ([r"\sqrt{2}"], r"\sqrt{2}"), (["(1, 2)"], "(1, 2)"),
    ],
)  # fmt: skip
def test_numbers_of_one_value_are_one_vote(spellings, vote):
    """math-verify agrees for every pair."""
    assert {Math().final_answer(f"so \\boxed{{{text}}}") for text in spellings} == {vote}
    assert all(equal(spellings[0], other) for other in spellings)


@pytest.mark.parametrize("answer", ["", "  ", "?", "$$", "{" * 20, "1+" * 300, "\\frac{1}{", "0.\\overline{x}"])
def test_an_answer_column_that_cannot_be_read_is_ungradable(prompt, answer):
    with pytest.raises(ValueError, match="not a number, expression or word"):
        Math().check_answer(answer)
    with pytest.raises(Ungradable):
        Math()(prompt(answer), r"\boxed{34}")


GARBAGE = [
    "9" * 100_000, "-" * 10_000, "\\frac" * 5000, "\\frac{" * 5000, "{" * 100_000, "1" + "{}" * 50_000, "$" * 100_000,
    "\\sqrt" * 200, "1,1," * 2000, "(" * 500, "x" * 400, "1+" * 200, "\\left(" * 80, "^" * 300, "_" * 300, "\\" * 500,
    "\\begin{pmatrix}" * 30, "&" * 300, "\ud800", "\x00", "\u202e34", "e^{e^{e^{e^{e}}}}", "1/0", "0/0", "\\frac00",
    "\\text{" * 100, "=" * 300, "34=34=34=" * 30, "\\int" * 100, "\\sum_{n=1}^{10000} n", "10^{-400}",
    "<" * 300, "\\{" * 200, "|" * 301, "!" * 200, "5" + "!" * 6, "\\pm" * 60, "%" * 300, "import os",
    "__import__('os')", "\\infty/\\infty",
]  # fmt: skip


@pytest.mark.slow
def test_nothing_written_as_an_answer_is_right_or_takes_longer_than_its_time(prompt):
    """The texts are garbage, and the formats' own cases with inserted characters."""
    symbols = sorted({character for case in math_cases.AGREED for character in case[1]})
    written = [*GARBAGE]
    for number in range(cases(40)):
        random = generator("math", number)
        answer = list(random.choice(math_cases.AGREED)[1])
        for _ in range(random.randrange(1, 4)):
            answer.insert(random.randrange(len(answer) + 1), random.choice(symbols))
        written.append("".join(answer))
    texts = [text for answer in written for text in (f"\\boxed{{{answer}}}", f"Answer: {answer}")]
    with RewardPool(RewardConfig(name="math", timeout_s=5.0)) as pool:
        started = time.monotonic()
        rewards, failed = asyncio.run(pool.score(prompt("987654.25"), texts))
        assert time.monotonic() - started < 5 * failed.sum() / 2 + 90
        assert not rewards.any()
        assert failed.sum() <= len(texts) // 8
        started = time.monotonic()
        towers = ["\\boxed{9^{9^{9^{9^{9}}}}}", "Answer: 10000000!!!", "Answer: 34"]
        rewards, failed = asyncio.run(pool.score(prompt("34"), towers))
        assert rewards[2] == 1
        assert time.monotonic() - started < 25
