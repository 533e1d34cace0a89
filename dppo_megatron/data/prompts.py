"""Prompts from a JSONL file, in an order that follows from seed and position alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo_megatron.errors import ExpectedError
from dppo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dppo_megatron.config.schema import DataConfig

_SHOWN = 50  # violations described in the message; of the rest it gives the line numbers


class PromptFileError(ExpectedError, ValueError):
    """Every malformed line of a prompt file. `violations`: (line number from 1, problem)."""

    def __init__(self, path: Path, violations: Sequence[tuple[int, str]]):
        self.violations = tuple(violations)
        count = len(self.violations)
        lines = [f"  - line {number}: {problem}" for number, problem in self.violations[:_SHOWN]]
        if rest := [number for number, _ in self.violations[_SHOWN:]]:
            lines.append(f"  - and lines {_ranges(rest)}")
        super().__init__("\n".join([f"{path}: {count} malformed line{'s' if count != 1 else ''}", *lines]))


class PromptSource:
    """The prompts of one JSONL file, tokenized.

    Position p is row p of a permutation drawn anew for each epoch (p // len) from `seed`; without `shuffle`
    it is the file's order. The whole file is read and tokenized on construction.

    Raises `PromptFileError` naming every malformed line (not JSON, no such column, empty prompt, more than
    `max_prompt_tokens` tokens), `ValueError` for a missing or empty file or an unusable template.
    """

    def __init__(self, path: str | Path, tokenizer: PreTrainedTokenizerBase, data_config: DataConfig, seed: int):
        self._path = Path(path)
        self._config = data_config
        self._seed = seed
        self._order_epoch = -1
        self._order = np.zeros(0, dtype=np.int64)
        self._rows = self._load(tokenizer)

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, position: int) -> Prompt:
        """The prompt at a place of the run's prompt order, from 0 and without end."""
        if position < 0:
            raise ValueError(f"prompt position {position}: positions count from 0")
        epoch, index = divmod(position, len(self._rows))
        row = int(self._epoch_order(epoch)[index])
        columns, text, answer, token_ids = self._rows[row]
        return Prompt(position, row, token_ids, text, answer, columns)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if epoch != self._order_epoch:
            count = len(self._rows)
            if self._config.shuffle:
                # Not Generator.permutation: numpy promises the stream of a bit generator for ever, not of
                # that.
                keys = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(count)
                self._order = np.argsort(keys, kind="stable")
            else:
                self._order = np.arange(count)
            self._order_epoch = epoch
        return self._order

    def _load(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[dict[str, Any], str, str, np.ndarray]]:
        violations: list[tuple[int, str]] = []
        parsed: list[tuple[int, dict[str, Any], str, str]] = []
        render = _renderer(tokenizer, self._config)
        for number, line in _numbered_lines(self._path):
            try:
                columns = _parse(line)
                prompt = _column(columns, self._config.prompt_column, "data.prompt_column")
                answer = _column(columns, self._config.answer_column, "data.answer_column")
                parsed.append((number, columns, render(prompt), _answer(answer)))
            except ValueError as error:
                violations.append((number, str(error)))
        if not parsed and not violations:
            raise ValueError(f"{self._path}: empty; it must hold one JSON object a line")
        texts = [text for _, _, text, _ in parsed]
        # A chat template writes its own special tokens.
        encoded = tokenizer(texts, add_special_tokens=not self._config.chat_template)["input_ids"] if texts else []
        rows = []
        limit = self._config.max_prompt_tokens
        for (number, columns, text, answer), ids in zip(parsed, encoded, strict=True):
            if not 0 < len(ids) <= limit:
                problem = f"{len(ids)} tokens, data.max_prompt_tokens is {limit}" if ids else "no tokens"
                violations.append((number, problem))
            rows.append((columns, text, answer, np.array(ids, dtype=np.int32)))
        if violations:
            raise PromptFileError(self._path, sorted(violations))
        return rows


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot read the prompt file: {error.strerror}") from error
    while lines and not lines[-1].strip():
        lines.pop()
    return enumerate(lines, start=1)


def _parse(line: bytes) -> dict[str, Any]:
    if not line.strip():
        raise ValueError("blank; remove it")
    try:
        columns = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    if not isinstance(columns, dict):
        raise ValueError(f"expected a JSON object, found {type(columns).__name__}")
    return columns


def _column(columns: dict[str, Any], name: str, setting: str) -> Any:
    if name not in columns:
        raise ValueError(f"no column {name!r} ({setting}); it has {', '.join(map(repr, columns)) or 'none'}")
    return columns[name]


def _answer(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"the answer is {type(value).__name__}, expected text or a number")
    return str(value)


def _renderer(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Any:
    """The function from the prompt column's value to the text the model reads; it raises `ValueError`."""
    template = config.prompt_template
    if "{prompt}" not in template:
        raise ValueError(f"data.prompt_template = {template!r}: must contain {{prompt}}")
    if config.chat_template and not tokenizer.chat_template:
        raise ValueError(
            "data.chat_template = true: the tokenizer has no chat template; set it to false or use an instruct model"
        )

    def fill(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"the prompt is {type(value).__name__}, expected text")
        if not value.strip():
            raise ValueError("the prompt is empty")
        # Not str.format: braces are common in mathematics.
        return template.replace("{prompt}", value)

    def chat(value: Any) -> str:
        messages = value if _is_messages(value) else [{"role": "user", "content": fill(value)}]
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # Templates raise their own errors, e.g. for roles they do not know.
        except Exception as error:
            raise ValueError(f"the chat template refuses it: {error}") from error

    return chat if config.chat_template else fill


def _is_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in value)
    )


def _ranges(numbers: Iterable[int]) -> str:
    """1, 4-6 for [1, 4, 5, 6]."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)
