"""Convert known datasets, from the user's files, to one JSON line per prompt: `dppo-megatron data prepare`.

Every recipe writes the columns prompt, answer and data_source, and recipe-specific columns. Unusable rows are skipped
and counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dppo_megatron.common.files import output, write_atomic
from dppo_megatron.errors import ExpectedError, shown

from .files import read_rows
from .messages import messages_of, plain
from .prompts import attempt
from .rows import check_text, column

_INTEGER = re.compile(r"[-+]?[0-9]+")
_BOX = re.compile(r"\\boxed\s*(?=\{)|\\fbox\s*(?=\{)")
_DAPO_TEMPLATE = re.compile(  # verl's AIME files contain it; eval.sets.NAME.prompt_template adds it
    r"Solve the following math problem step by step\. [^\n]*\n\n(.*)\n\nRemember to put your answer [^\n]*", re.DOTALL
)
_LEVEL = re.compile(r"(?:Level\s*)?([1-5])")


class RecipeError(ExpectedError, ValueError):
    """The source has another format than the recipe reads."""


class _LeftOut(ValueError):
    """The recipe rejects this row."""


Row = dict[str, Any]


def prepare(recipe: str, source: Path, out: Path, *, levels: tuple[int, int] = (1, 5)) -> str:
    """Write `out`; return a report on the rows read, written and skipped. Raises `RecipeError`.

    A repeated prompt with the same answer is skipped. A prompt with different answers is removed completely.
    levels: (lowest, highest) MATH level.
    """
    if recipe not in RECIPES:
        raise RecipeError(f"{recipe}: no such recipe; there are {', '.join(RECIPES)}")
    if out.exists():
        raise RecipeError(f"{out}: exists; name another file, or remove it")
    rows: dict[str, Row] = {}
    left_out: Counter[str] = Counter()
    conflicting: set[str] = set()
    total = 0
    for number, columns in read_rows(source):
        total += 1
        if isinstance(columns, ValueError):
            raise RecipeError(f"{source}: line {number}: {columns}")
        try:
            row = RECIPES[recipe](plain(columns))
            if "level" in row and not levels[0] <= row["level"] <= levels[1]:
                raise _LeftOut(f"level outside {levels[0]} to {levels[1]}")
            if attempt(check_text, row["prompt"] + row["answer"], "it") is not None:
                raise _LeftOut("with a control character or half a surrogate pair")
        except _LeftOut as error:
            left_out[str(error)] += 1
            continue
        except ValueError as error:
            raise RecipeError(f"{source}: row {number} does not have the format of {recipe}: {error}") from None
        first_row = rows.setdefault(row["prompt"], row)
        if first_row is not row:
            same_answer = first_row["answer"] == row["answer"]
            left_out["repeated"] += same_answer
            if not same_answer:
                conflicting.add(row["prompt"])
    for prompt in conflicting:
        del rows[prompt]
    if not rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())
        raise RecipeError(f"{source}: nothing is left of {total} rows ({reasons})")
    write_atomic(output(out, "OUT"), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values()))
    lines = [f"{out}: {len(rows)} prompts of {total} rows"]
    lines += [f"  left out: {count} {reason}" for reason, count in left_out.most_common() if count]
    if conflicting:
        lines.append(f"  left out: {len(conflicting)} prompts with different answers, e.g. {shown(min(conflicting))}")
    if recipe.startswith("aime") and len(rows) != 30:
        lines.append("  note: a year of AIME has 30 problems")
    return "\n".join(lines)


def _dapo(columns: Row) -> Row:
    """Read verl's schema, or rows with text as prompt."""
    answer = str(_first(columns, "reward_model.ground_truth", "answer", "solution")).strip()
    if not _INTEGER.fullmatch(answer):
        raise _LeftOut("with an answer that is not an integer")
    prompt = _user_text(_first(columns, "prompt", "problem"))
    row = {"prompt": prompt, "answer": str(int(answer)) if len(answer) < 1000 else answer, "data_source": "math_dapo"}
    index = columns.get("extra_info")
    return row | ({"index": index["index"]} if isinstance(index, dict) and "index" in index else {})


def _math(columns: Row) -> Row:
    solution = columns.get("solution")
    answer = columns.get("answer")
    if answer is None:
        answer = _last_box(str(solution or ""))
        if answer is None:
            raise _LeftOut("without a boxed answer")
    row = {"prompt": _text(_first(columns, "problem", "prompt")), "answer": str(answer), "data_source": "math"}
    level = _LEVEL.fullmatch(str(columns.get("level", "")).strip())
    if level is None:
        raise _LeftOut("without a level")  # the published files have `Level ?`
    subject = columns.get("type", columns.get("subject"))
    return row | {"level": int(level[1])} | ({"subject": subject} if subject else {})


def _aime(year: int) -> Callable[[Row], Row]:
    def read(columns: Row) -> Row:
        lower = {name.lower(): value for name, value in columns.items()}
        if "year" in lower and str(lower["year"]) != str(year):
            raise _LeftOut(f"of another year than {year}")
        answer = str(_first(lower, "answer", "reward_model.ground_truth")).strip()
        if not _INTEGER.fullmatch(answer) or not 0 <= int(answer[:20]) <= 999:
            raise ValueError(f"the answer {shown(answer)} is not an integer from 0 to 999")
        prompt = _user_text(_first(lower, "problem", "question", "prompt"))
        prompt = _DAPO_TEMPLATE.sub(r"\1", prompt.strip())
        return {"prompt": prompt, "answer": str(int(answer)), "data_source": f"aime{year}"}

    return read


def _gsm8k(columns: Row) -> Row:
    solution = _text(_first(columns, "answer"))
    number = solution.rpartition("####")[2].strip().replace(",", "")
    if "####" not in solution or not re.fullmatch(r"-?[0-9]+(?:\.[0-9]+)?", number):
        raise ValueError("the answer does not end in `#### number`")
    prompt = _text(_first(columns, "question", "prompt"))
    return {"prompt": prompt, "answer": number, "data_source": "openai/gsm8k", "solution": solution}


RECIPES: dict[str, Callable[[Row], Row]] = {
    "dapo-math-17k": _dapo,
    "math": _math,
    "aime-2024": _aime(2024),
    "aime-2025": _aime(2025),
    "gsm8k": _gsm8k,
}


def _first(columns: Row, *names: str) -> Any:
    for name in names:
        value = attempt(column, columns, name, "")
        if value is not None and not isinstance(value, ValueError):
            return value
    raise ValueError(f"no column {' or '.join(names)}; it has {', '.join(map(repr, columns))[:200]}")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{type(value).__name__} instead of text")
    return value


def _user_text(value: Any) -> str:
    """Return a text, or a single user message's text."""
    messages = messages_of(value) or []
    return _text(messages[0]["content"] if [turn["role"] for turn in messages] == ["user"] else value)


def _last_box(solution: str) -> str | None:
    """Return the content of the last closed \\boxed{}."""
    for match in reversed(list(_BOX.finditer(solution))):
        level = 0
        for place in range(match.end(), len(solution)):
            level += {"{": 1, "}": -1}.get(solution[place], 0)
            if level == 0:
                return solution[match.end() + 1 : place].strip() or None
    return None
