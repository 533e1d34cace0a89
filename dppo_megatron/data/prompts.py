"""Prompts from a JSONL file, in an order that follows from seed and position alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo_megatron.types import Prompt

from .rows import PromptFileError, check_text, column, numbered_lines, parse_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dppo_megatron.config.schema import DataConfig

_CHARACTERS_PER_TOKEN = 1000  # no token is longer; text that is need not be tokenized to be refused


class PromptSource:
    """The prompts of one JSONL file, tokenized.

    Position p is row p of a permutation drawn anew for each epoch (p // len) from `seed`; without `shuffle`
    it is the file's order. The whole file is read and tokenized on construction.

    Raises `PromptFileError` naming every malformed line (not JSON, no such column, empty prompt, more than
    `max_prompt_tokens` tokens), and for a missing or empty file; `ValueError` for an unusable template.
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
        longest = _CHARACTERS_PER_TOKEN * self._config.max_prompt_tokens
        for number, line in numbered_lines(self._path):
            try:
                columns = parse_line(line)
                text = render(column(columns, self._config.prompt_column, "data.prompt_column"))
                answer = _answer(column(columns, self._config.answer_column, "data.answer_column"))
                check_text(text, "the prompt")
                check_text(answer, "the answer")
                if len(text) > longest:
                    limit = self._config.max_prompt_tokens
                    raise ValueError(f"{len(text)} characters, data.max_prompt_tokens is {limit}")
                parsed.append((number, columns, text, answer))
            except ValueError as error:
                violations.append((number, str(error)))
        if not parsed and not violations:
            raise PromptFileError(self._path, problem="empty; it must hold one JSON object a line")
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


def _answer(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"the answer is {type(value).__name__}, expected text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the answer is {value}")
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
