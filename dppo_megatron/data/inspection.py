"""Describe a file's contents and the rows that a run cannot use: `dppo-megatron data inspect`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo_megatron.errors import bounded, shown

from .files import unit
from .prompts import PromptRow, parse_rows, renderer
from .rows import shorten_list

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dppo_megatron.config.schema import DataConfig

_BINS = 10
_WIDTH = 40  # characters of the longest bar
_SHOWN = 5  # rows listed per kind
_LONGEST_PROMPT = 1200

CheckAnswers = Callable[[Sequence[tuple[str, str]]], list[str | None]]


def inspect(
    path: Path, config: DataConfig, tokenizer: PreTrainedTokenizerBase | None, check_answers: CheckAnswers | None
) -> str:
    """Return a report on a file. Without a tokenizer, lengths are counted in characters.

    Raises `PromptFileError` for a missing file.
    """
    render = renderer(tokenizer, config)
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    rows: list[PromptRow] = []
    unusable: list[tuple[int, str]] = []
    total = readable = 0
    for number, columns, row in parse_rows(path, config, render):
        total += 1
        readable += columns is not None
        for name, value in (columns or {}).items():
            kinds[name][_kind(value)] += 1
        if isinstance(row, ValueError):
            unusable.append((number, str(row)))
        else:
            rows.append(row)
    unit_name = unit(path)
    out = [f"{path}: {total} {unit_name}s", "", "columns"]
    width = max(map(len, kinds), default=0)
    out += [f"  {name:{min(width, 40)}}  {_count(counts, readable)}" for name, counts in kinds.items()]
    if sources := Counter(row.source for row in rows if row.source):
        named = (f"{source} {count}" for source, count in sources.most_common())
        out += ["", f"{config.source_column}: {shorten_list(named, 400)}"]
    if rows:
        out += [
            "",
            *_lengths(rows, config, tokenizer),
            "",
            f"prompt of {unit_name} {rows[0].number}, as the model reads it",
        ]
        out += ["  " + line for line in bounded(rows[0].text, _LONGEST_PROMPT).splitlines()]
        out += [f"answer: {shown(rows[0].answer)}"]
    out += ["", *_problem_lines(f"{unit_name}s that cannot be used", unusable, unit_name), *_duplicates(rows)]
    if check_answers is not None and rows:
        problems = check_answers([(row.source, row.answer) for row in rows])
        unread = [(row.number, problem) for row, problem in zip(rows, problems, strict=True) if problem]
        out += _problem_lines("answers that the reward cannot compare with", unread, unit_name)
    return "\n".join(out)


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{shorten_list(value, 60)}}}"
    if isinstance(value, list):
        return "messages" if value and isinstance(value[0], dict) and "role" in value[0] else "list"
    return {"str": "text", "NoneType": "empty"}.get(type(value).__name__, type(value).__name__)


def _count(counts: Counter[str], total: int) -> str:
    absent = total - counts.total()
    parts = [f"{kind} {count}" if len(counts) > 1 else kind for kind, count in counts.most_common(4)]
    return ", ".join([*parts, *([f"absent {absent}"] if absent else [])])


def _lengths(rows: Sequence[PromptRow], config: DataConfig, tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    texts = [row.text for row in rows]
    if tokenizer is None:
        name, lengths = "characters", np.array([len(text) for text in texts])
    else:
        ids = tokenizer(texts, add_special_tokens=not config.chat_template)["input_ids"]
        name, lengths = "tokens", np.array([len(part) for part in ids])
    low, median, p95, high = np.percentile(lengths, [0, 50, 95, 100]).round().astype(int)
    out = [f"prompt {name}: {low} to {high}, median {median}, 95 % at most {p95}"]
    size = max(1, -(-int(high - low + 1) // _BINS))
    counts = np.bincount((lengths - low) // size)
    digits = len(str(low + size * len(counts)))
    for number, count in enumerate(counts.tolist()):
        first = low + number * size
        bar = "#" * -(-count * _WIDTH // int(counts.max()))
        out.append(f"  {first:{digits}} to {first + size - 1:{digits}}  {bar} {count}".rstrip())
    if tokenizer is not None and (num_longer := int((lengths > config.max_prompt_tokens).sum())):
        out.append(f"  {num_longer} of more than data.max_prompt_tokens = {config.max_prompt_tokens}")
    return out


def _duplicates(rows: Sequence[PromptRow]) -> list[str]:
    answers: dict[str, set[str]] = defaultdict(set)
    counts = Counter(row.text for row in rows)
    for row in rows:
        answers[row.text].add(row.answer)
    repeated = [text for text, count in counts.items() if count > 1]
    out = [f"prompts that occur more than once: {len(repeated)}"]
    if repeated:
        out[0] += f", in {sum(counts[text] for text in repeated)} rows"
    if different := [text for text in repeated if len(answers[text]) > 1]:
        out.append(f"  {len(different)} of them with different answers, e.g. {shown(different[0])}")
    return out


def _problem_lines(title: str, problems: Sequence[tuple[int, str]], unit_name: str) -> list[str]:
    remainder = [f"  and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return [
        f"{title}: {len(problems)}",
        *(f"  {unit_name} {n}: {bounded(problem, 300)}" for n, problem in problems[:_SHOWN]),
        *remainder,
    ]
