"""Read prompts from data files, in an order that depends only on seed and position."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from dppo_megatron.errors import shown
from dppo_megatron.types import Prompt

from .files import read_rows, unit
from .messages import messages_of, plain, text_of
from .order import EpochOrder, Mixture
from .rows import PromptFileError, check_text, column
from .tokenizer import TokenizerError, end_token_ids
from .worker import render_chats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dppo_megatron.config.schema import Config, DataConfig

__all__ = ["PromptFile", "PromptFileError", "PromptSource", "parse_rows", "renderer", "training_prompts"]

T = TypeVar("T")
Render = Callable[[Sequence[Any]], list[str | ValueError]]

_BATCH = 256  # rows rendered together
_ANSWER = "ANSWER"  # placeholder for an answer in a chat
_CHARACTERS_PER_TOKEN = 1000  # no token is longer, so a longer text is rejected without tokenizing it


class PromptRow(NamedTuple):
    number: int  # row in the file, from 1
    columns: dict[str, Any]
    text: str
    answer: str
    source: str
    token_ids: np.ndarray  # [P] int32


class PromptFile:
    """Reads the prompts of one file, and renders and tokenizes them. The whole file is read on construction.

    Raises `PromptFileError` for a missing or empty file, or with every malformed line: not JSON, no such column, empty
    prompt, or more than `max_prompt_tokens` tokens unless `overlong` allows them. Raises `ValueError` for an unusable
    template.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase | None,
        data_config: DataConfig,
        tools: Sequence[dict[str, Any]] = (),
    ):
        self.path = Path(path)
        self.total = 0  # rows in the file, including dropped ones
        self._config = data_config
        self.rows = self._load(tokenizer, renderer(tokenizer, data_config, tools))
        self.truncated = sum(len(row.token_ids) > data_config.max_prompt_tokens for row in self.rows)
        if data_config.overlong == "truncate" and tokenizer is not None:
            self.rows = [self._cut(row, tokenizer) for row in self.rows]

    def error(self, violations: list[tuple[int, str]]) -> PromptFileError:
        """Return the error for unusable rows, given as (number, problem)."""
        return PromptFileError(self.path, sorted(violations), unit=unit(self.path))

    def describe(self) -> str:
        limit = self._config.max_prompt_tokens
        dropped = self.total - len(self.rows)
        distinct = len({row.text for row in self.rows})
        repeats = f", only {distinct} different ones," if distinct < len(self.rows) else ""
        summary = f"{len(self.rows)} prompts{repeats} from {self.path}"
        if dropped:
            return f"{summary}; {dropped} dropped, of more than data.max_prompt_tokens = {limit} tokens"
        return f"{summary}; {self.truncated} truncated to {limit} tokens" if self.truncated else summary

    def _load(self, tokenizer: PreTrainedTokenizerBase | None, render: Render) -> list[PromptRow]:
        violations: list[tuple[int, str]] = []
        rows: list[PromptRow] = []
        longest = _CHARACTERS_PER_TOKEN * self._config.max_prompt_tokens
        limit = self._config.max_prompt_tokens
        for number, _, row in parse_rows(self.path, self._config, render):
            self.total += 1
            if isinstance(row, ValueError):
                violations.append((number, str(row)))
            elif len(row.text) <= longest:
                rows.append(row)
            elif self._config.overlong != "drop":
                violations.append((number, f"{len(row.text)} characters, data.max_prompt_tokens is {limit}"))
        if not self.total:
            raise PromptFileError(self.path, problem="empty; it must have one JSON object per line")
        texts = [row.text for row in rows]
        # A chat template writes the special tokens.
        special = not self._config.chat_template
        encoded = (
            tokenizer(texts, add_special_tokens=special)["input_ids"] if texts and tokenizer else [[0]] * len(rows)
        )
        out = []
        for row, ids in zip(rows, encoded, strict=True):
            if not ids or (len(ids) > limit and self._config.overlong == "refuse"):
                remedy = "raise it, or set data.overlong to drop or truncate"
                problem = f"{len(ids)} tokens, data.max_prompt_tokens is {limit}; {remedy}" if ids else "no tokens"
                violations.append((row.number, problem))
            elif len(ids) <= limit or self._config.overlong == "truncate":
                out.append(row._replace(token_ids=np.array(ids, dtype=np.int32)))
        if violations:
            raise self.error(violations)
        if not out:
            problem = f"every prompt has more than data.max_prompt_tokens = {limit} tokens"
            raise PromptFileError(self.path, problem=problem)
        return out

    def _cut(self, row: PromptRow, tokenizer: PreTrainedTokenizerBase) -> PromptRow:
        if len(row.token_ids) <= self._config.max_prompt_tokens:
            return row
        ids = row.token_ids[-self._config.max_prompt_tokens :]
        return row._replace(token_ids=ids, text=str(tokenizer.decode(ids)))


class PromptSource:
    """Provides a run's prompts, in an endless order.

    Each epoch (p // len) has a new permutation from `seed`, in which position p is row p % len. Without `shuffle`, the
    file order is used. Several files have separate orders and alternate by weight. `Prompt.row` counts the rows of all
    files, in config order. Raises the errors of `PromptFile`.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        data_config: DataConfig,
        seed: int,
        extra_files: tuple[tuple[Path, float], ...] = (),
        tools: Sequence[dict[str, Any]] = (),
    ):
        """Read the files. extra_files: (file, weight); the first file has weight 1. tools: for chat templates."""
        paths = [Path(path), *(file for file, _ in extra_files)]
        self.files = [PromptFile(file, tokenizer, data_config, tools) for file in paths]
        self._first_rows = np.cumsum([0, *(file.total for file in self.files)])
        self._mixture = Mixture([1.0, *(weight for _, weight in extra_files)])
        seeds = [(seed,), *((seed, number) for number in range(1, len(paths)))]
        self._orders = [EpochOrder(len(file.rows), seeds[i], data_config.shuffle) for i, file in enumerate(self.files)]

    def __len__(self) -> int:
        return sum(len(file.rows) for file in self.files)

    def once(self) -> list[Prompt]:
        """Return all prompts in a single file, in first-epoch order."""
        return [self.prompt(position) for position in range(len(self))]

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at a position, from 0, in the run's endless prompt order."""
        if position < 0:
            raise ValueError(f"prompt position {position}: positions count from 0")
        file, place = self._mixture.at(position)
        row = self.files[file].rows[self._orders[file].row(place)]
        number = int(self._first_rows[file]) + row.number - 1
        return Prompt(position, number, row.token_ids, row.text, row.answer, row.columns, row.source)


def training_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]] = ()
) -> PromptSource:
    """Return a run's training prompts. tools: for chat templates."""
    (path, _), *further_files = config.data.train_files
    return PromptSource(path, tokenizer, config.data, config.run.seed, tuple(further_files), tools)


def answer_ids(tokenizer: PreTrainedTokenizerBase, answer: str, end: int) -> np.ndarray:
    """Return a given answer as a response: [A] int32, including the end token."""
    return np.array([*tokenizer.encode(answer, add_special_tokens=False), end], np.int32)


def answer_end(config: Config, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token id that ends a given answer; the policy must sample this token to end a response.

    With a chat template, it is the first model end token that the template writes after an answer. Without a template,
    it is the tokenizer's end token, or the model's only end token. Raises `TokenizerError`.
    """
    ends = end_token_ids(config.model.path, tokenizer)
    answer_ends: list[int] = list(ends) if len(ends) == 1 else []
    if config.data.chat_template:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        (text,) = render_chats(tokenizer, [chat], answered=True)
        written = str(text).rpartition(_ANSWER)[2]
        answer_ends = [i for i in tokenizer.encode(written, add_special_tokens=False) if i in ends]
    elif tokenizer.eos_token_id is not None:
        answer_ends = [int(tokenizer.eos_token_id)]
    if answer_ends:
        return answer_ends[0]
    where = f"its chat template writes {written!r} after an answer" if config.data.chat_template else "it has several"
    raise TokenizerError(
        f"model.path = {config.model.path}: no token ends an answer: {where}, and generation_config.json, config.json "
        f"and the tokenizer name {tokenizer.convert_ids_to_tokens(list(ends))}; name the right one as eos_token there"
    )


def parse_rows(
    path: Path, config: DataConfig, render: Render
) -> Iterator[tuple[int, dict[str, Any] | None, PromptRow | ValueError]]:
    """Yield (number, columns, row without tokens) for every row in a file.

    For an unusable row, an error with the reason replaces the row. Columns are None for an unreadable row.
    """
    rows = read_rows(path, in_memory=True)
    while batch := list(itertools.islice(rows, _BATCH)):
        prompts = [attempt(column, columns, config.prompt_column, "data.prompt_column") for _, columns in batch]
        for (number, columns), text in zip(batch, render(prompts), strict=True):
            if isinstance(columns, ValueError):
                yield number, None, columns
            else:
                yield number, columns, attempt(_row, text, number, columns, config)


def attempt(call: Callable[..., T], value: Any, *arguments: Any) -> T | ValueError:
    """Return the result of `call`, or the `ValueError` that it raises. A `value` that is an error is returned."""
    try:
        return value if isinstance(value, ValueError) else call(value, *arguments)
    except ValueError as error:
        return error


def _row(text: str, number: int, columns: dict[str, Any], config: DataConfig) -> PromptRow:
    answer = _answer(column(columns, config.answer_column, "data.answer_column"))
    check_text(text, "the prompt")
    check_text(answer, "the answer")
    return PromptRow(number, columns, text, answer, _source(columns, config.source_column), np.zeros(0, np.int32))


def _source(columns: dict[str, Any], name: str) -> str:
    value = attempt(plain, attempt(column, columns, name, "data.source_column"))
    return "" if value is None or isinstance(value, ValueError) else str(value)


def _answer(value: Any) -> str:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"the answer is {type(value).__name__}, expected text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the answer is {value}, expected text or a finite number")
    return str(value)


def renderer(
    tokenizer: PreTrainedTokenizerBase | None, config: DataConfig, tools: Sequence[dict[str, Any]] = ()
) -> Render:
    """Return a function that renders prompt column values to model input texts or to errors.

    tools: for chat templates. The function raises `ChatTemplateError`.
    """
    template = config.prompt_template
    if "{prompt}" not in template:
        raise ValueError(f"data.prompt_template = {template!r}: must contain {{prompt}}")
    chat = getattr(tokenizer, "chat_template", None)
    if not config.chat_template:  # without a tokenizer, a chat template may exist
        return lambda values: [attempt(_lone_text, value, config, tokenizer is None or bool(chat)) for value in values]
    if tokenizer is None or not chat:
        raise ValueError(
            "data.chat_template = true: the tokenizer has no chat template; set it to false or use an instruct model"
        )

    def render(values: Sequence[Any]) -> list[str | ValueError]:
        chats = [attempt(prompt_messages, value, config) for value in values]
        return [attempt(_complete, *pair) for pair in zip(render_chats(tokenizer, chats, tools), chats, strict=True)]

    return render


def prompt_messages(value: Any, config: DataConfig) -> list[dict[str, Any]]:
    """Convert a prompt column value to the first chat messages. Raises `ValueError`.

    `data.prompt_template` is the text around the user's last message.
    """
    messages = messages_of(value) or [{"role": "user", "content": value}]
    if (role := messages[-1]["role"]) in ("assistant", "gpt", "bot", "human"):
        raise ValueError(f"the last message has the role {role}; end with a question: remove an answer, or write user")
    last = next((turn for turn in reversed(messages) if turn["role"] == "user"), None)
    if last is not None:
        last["content"] = _fill(last["content"], config)
    elif config.prompt_template != "{prompt}":
        raise ValueError("the prompt has no user message for data.prompt_template; remove the setting, or add one")
    return messages


def _complete(text: str, chat: Sequence[dict[str, Any]]) -> str:
    """Raise `ValueError` if a chat template left out a message. It may change policy and tool messages."""
    messages = [(turn["content"].strip(), turn["role"]) for turn in chat if turn["role"] not in ("assistant", "tool")]
    for content, role in messages:
        if text.count(content) < sum(content == other for other, _ in messages):
            raise ValueError(f"the chat template leaves out a message of role {shown(role)}; change its role")
    return text


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
) -> str:
    """Render a chat to the model input text, up to the start of the answer. Raises `ValueError`."""
    (text,) = render_chats(tokenizer, [messages], tools)
    if isinstance(text, ValueError):
        raise text
    return text


def _lone_text(value: Any, config: DataConfig, chat: bool) -> str:
    """Return the prompt text without a chat template. chat: whether the tokenizer has a chat template."""
    if (chat_messages := messages_of(value)) and not chat:
        raise ValueError(
            f"{len(chat_messages)} messages, but the tokenizer has no chat template; use a model that has one, or name "
            f"the text of a single message: data.prompt_column = {config.prompt_column}.0.content"
        )
    messages = prompt_messages(value, config)
    if [turn["role"] for turn in messages] != ["user"]:
        raise ValueError(f"{len(messages)} messages; set data.chat_template = true, or keep only one user message")
    return messages[0]["content"]


def _fill(value: Any, config: DataConfig) -> str:
    if not (text := text_of(value)).strip():
        raise ValueError("the prompt is empty")
    # str.format would interpret other braces; they are common in mathematics.
    return config.prompt_template.replace("{prompt}", text)
