"""Build one trajectory as tokens. Sampled tokens never change, and the environment's text is appended to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from dppo_megatron.types import ENVIRONMENT, INHERITED, POLICY, Rollout, join_columns

from .interface import Message
from .tool_messages import ChatMessage, assistant_message, render_turns
from .tools import MARKS, turn_parts

Render = Callable[[Sequence[ChatMessage]], str]
"""Returns a chat as the model reads it, up to the start of its answer."""


class Codec(Protocol):
    """Declares the tokenizer methods that are used here."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Any, /, *, skip_special_tokens: bool) -> Any: ...  # str; a list for a batch


@dataclass(frozen=True)
class Piece:
    """Contains consecutive tokens of one origin. `sampled` is the engine's result for policy tokens."""

    origin: int
    turn: int
    text: str
    token_ids: np.ndarray  # int32
    sampled: Rollout | None = None


@dataclass
class Dialogue:
    """Contains the branches of a trajectory; only the last branch continues.

    `render` is None without a chat template; text is then appended to the tokens unchanged. A template may change the
    text of earlier turns, for example remove thinking or change white space. A new branch then begins: it keeps the
    common pieces and tokenizes the rest again.
    """

    codec: Codec
    render: Render | None
    messages: list[ChatMessage]
    branches: list[list[Piece]]  # at first one branch with the prompt
    turns: int = 0
    calls: int = 0  # tool calls
    call_errors: int = 0
    _sent: dict[int, ChatMessage] = field(default_factory=dict)  # index in messages -> the turn with `tool_calls`

    @property
    def token_ids(self) -> np.ndarray:
        """Return all tokens so far, [S] int32; the next turn is sampled after them."""
        return ids_of(self.branches[-1])

    def add_turn(self, sampled: Rollout) -> None:
        text = self.codec.decode(sampled.token_ids, skip_special_tokens=False)
        self.branches[-1].append(Piece(POLICY, self.turns, text, sampled.token_ids, sampled))
        self.turns += 1

    def answer(self, replies: list[Message]) -> bool:
        """Append the environment's messages to the last turn; return whether that began a new branch."""
        branch = self.branches[-1]
        turn = branch[-1].turn
        if self.render is None:
            branch += put(self.codec, turn, "".join(message["content"] for message in replies))
            return False
        # A template expects a turn without the token that ended it.
        last = self.codec.decode(branch[-1].token_ids[:-1], skip_special_tokens=False)
        reasoning, content, calls = turn_parts(last, offered=True)
        ids = (message["tool_call_id"] for message in replies if "tool_call_id" in message)
        sent = assistant_message(content, zip(ids, calls, strict=False))
        self._sent[len(self.messages)] = sent if content else sent | {"thinking": reasoning}  # gpt-oss takes only one
        self.messages += [assistant_message(last), *({**message} for message in replies)]
        messages = [self._sent.get(place, message) for place, message in enumerate(self.messages)]
        prefix, rest = beginning(branch, render_turns(self.render, self.messages, messages))
        if len(prefix) == len(branch):
            branch += put(self.codec, turn, rest)
            return False
        self.branches.append([*inherited(prefix), *put(self.codec, turn, rest)])
        return True

    def finished(self) -> list[list[Piece]]:
        """Return the branches as stored, cut after the last policy turn. Branches without a policy turn are dropped."""
        out = []
        for branch in self.branches:
            last = max((i for i, piece in enumerate(branch) if piece.origin == POLICY), default=None)
            if last is not None:
                out.append(branch[: last + 1])
        return out


def readable(codec: Codec, ids: np.ndarray) -> str:
    """Return the turn text without special tokens, but keep `MARKS`, even if the tokenizer makes them special."""
    encoded = ((mark, codec.encode(mark, add_special_tokens=False)) for mark in MARKS)
    special = {
        mark_ids[0]: m
        for m, mark_ids in encoded
        if len(mark_ids) == 1 and not codec.decode(mark_ids, skip_special_tokens=True)
    }
    parts = np.split(ids, [place for place, token in enumerate(ids.tolist()) if token in special])
    return "".join(special.get(int(p[0]), "") + codec.decode(p, skip_special_tokens=True) for p in parts if len(p))


def put(codec: Codec, turn: int, text: str) -> list[Piece]:
    """Return a list with a piece for the text that follows `turn`; an empty list if the text has no token."""
    ids = codec.encode(text, add_special_tokens=False) if text else []
    return [Piece(ENVIRONMENT, turn, text, np.array(ids, np.int32))] if ids else []


def inherited(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces as the beginning of another branch."""
    return [replace(piece, origin=INHERITED, sampled=None) if piece.origin == POLICY else piece for piece in pieces]


def opening_tokens(branch: Sequence[Piece]) -> np.ndarray:
    """Return the tokens before the first policy token, [P] int32."""
    sampled = (i for i, piece in enumerate(branch) if piece.origin != ENVIRONMENT)
    return ids_of(branch[: next(sampled, len(branch))])


def common_beginning(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the longest common beginning of all arrays: [1, 2, 3] and [1, 2, 4] give [1, 2]."""
    first = arrays[0]
    for other in arrays[1:]:
        size = min(len(first), len(other))
        differences = np.flatnonzero(first[:size] != other[:size])
        first = first[: differences[0] if len(differences) else size]
    return first


def as_rollout(branch: Sequence[Piece], prompt_tokens: int, finish_reason: str, trajectory: int) -> Rollout:
    """Return a branch as the bank stores it, without the first `prompt_tokens` tokens, which are the prompt."""
    spans = [[piece.origin, len(piece.token_ids), piece.turn] for piece in branch if len(piece.token_ids)]
    skip = prompt_tokens
    while skip:  # the prompt is not a span
        spans[0][1], skip = max(spans[0][1] - skip, 0), max(skip - spans[0][1], 0)
        spans = spans if spans[0][1] else spans[1:]
    return Rollout.from_columns(
        join_columns([piece.sampled.columns for piece in branch if piece.sampled is not None]),
        token_ids=ids_of(branch)[prompt_tokens:],
        finish_reason=finish_reason,
        spans=np.array(spans, np.int32),
        trajectory=trajectory,
    )


def beginning(branch: Sequence[Piece], text: str) -> tuple[list[Piece], str]:
    """Return the pieces that `text` begins with, and the text after them."""
    for number, piece in enumerate(branch):
        if not text.startswith(piece.text):
            return list(branch[:number]), text
        text = text[len(piece.text) :]
    return list(branch), text


def ids_of(pieces: Sequence[Piece]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *(piece.token_ids for piece in pieces)])
