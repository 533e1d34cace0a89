"""One trajectory as tokens: what was sampled never changes, what is said in between is put behind it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from dppo_megatron.types import ENVIRONMENT, INHERITED, POLICY, Rollout, join_columns

from .interface import Message

log = logging.getLogger(__name__)

Render = Callable[[Sequence[dict[str, Any]]], str]
"""A chat as the model reads it, up to where it answers."""

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


class Codec(Protocol):
    """What is used of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Any, *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one origin. sampled: what the engine returned, of the policy's."""

    origin: int
    turn: int
    text: str
    token_ids: np.ndarray  # int32
    sampled: Rollout | None = None


@dataclass
class Dialogue:
    """The branches of one trajectory, the last of which goes on.

    render: None where there is no chat template; what is said is then put behind the tokens as it is. Where the
    template writes a history that does not begin with the text of the tokens so far (thinking removed, white space
    changed), a new branch begins: it keeps the pieces up to there and reads the rest anew.
    """

    codec: Codec
    render: Render | None
    messages: list[dict[str, Any]]
    branches: list[list[Piece]] = field(default_factory=list)
    turns: int = 0

    @classmethod
    def begin(cls, codec: Codec, render: Render | None, messages: list[dict[str, Any]], prompt: Piece) -> Dialogue:
        return cls(codec, render, messages, [[prompt]])

    @property
    def token_ids(self) -> np.ndarray:
        """[S] int32, all tokens so far: what the next turn is sampled behind."""
        return ids_of(self.branches[-1])

    def add_turn(self, sampled: Rollout) -> None:
        text = self.codec.decode(sampled.token_ids, skip_special_tokens=False)
        self.branches[-1].append(Piece(POLICY, self.turns, text, sampled.token_ids, sampled))
        self.turns += 1

    def answer(self, said: list[Message]) -> bool:
        """Puts what the environment says behind the last turn; returns whether that began a new branch."""
        branch = self.branches[-1]
        turn = branch[-1].turn
        if self.render is None:
            self._put(branch, turn, "".join(message["content"] for message in said))
            return False
        self.messages += [{"role": "assistant", "content": self._last_words()}, *said]
        text = self.render(self.messages)
        kept, rest = beginning(branch, text)
        if len(kept) == len(branch):
            self._put(branch, turn, rest)
            return False
        new = inherited(kept)
        self._put(new, turn, rest)
        self.branches.append(new)
        return True

    def _put(self, branch: list[Piece], turn: int, text: str) -> None:
        branch += put(self.codec, turn, text)

    def _last_words(self) -> str:
        """The last turn as a template takes it: without the token that ended it."""
        ids = self.branches[-1][-1].token_ids
        return self.codec.decode(ids[:-1], skip_special_tokens=False)

    def finished(self) -> list[list[Piece]]:
        """The branches as they are stored: up to the last token of the policy, those without any left out."""
        out = []
        for branch in self.branches:
            last = max((i for i, piece in enumerate(branch) if piece.origin == POLICY), default=None)
            if last is not None:
                out.append(branch[: last + 1])
        return out


def readable(codec: Codec, ids: np.ndarray) -> str:
    """The text of a turn without special tokens, except for `MARKS`, which some tokenizers count among them."""
    encoded = ((mark, codec.encode(mark, add_special_tokens=False)) for mark in MARKS)
    special = {own[0]: m for m, own in encoded if len(own) == 1 and not codec.decode(own, skip_special_tokens=True)}
    parts = np.split(ids, [place for place, token in enumerate(ids.tolist()) if token in special])
    return "".join(special.get(int(p[0]), "") + codec.decode(p, skip_special_tokens=True) for p in parts if len(p))


def put(codec: Codec, turn: int, text: str) -> list[Piece]:
    """What is said behind `turn`; nothing where it has no token."""
    ids = codec.encode(text, add_special_tokens=False) if text else []
    return [Piece(ENVIRONMENT, turn, text, np.array(ids, np.int32))] if ids else []


def inherited(pieces: Sequence[Piece]) -> list[Piece]:
    """As another branch begins with them."""
    return [replace(piece, origin=INHERITED, sampled=None) if piece.origin == POLICY else piece for piece in pieces]


def opening_tokens(branch: Sequence[Piece]) -> np.ndarray:
    """[P] int32, the tokens before any that a policy sampled."""
    sampled = (i for i, piece in enumerate(branch) if piece.origin != ENVIRONMENT)
    return ids_of(branch[: next(sampled, len(branch))])


def common_beginning(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The longest array with which all begin."""
    first = arrays[0]
    for other in arrays[1:]:
        size = min(len(first), len(other))
        differing = np.flatnonzero(first[:size] != other[:size])
        first = first[: differing[0] if len(differing) else size]
    return first


def as_rollout(branch: Sequence[Piece], prompt_tokens: int, finish_reason: str, trajectory: int) -> Rollout:
    """A branch as the bank stores it, behind a prompt of `prompt_tokens` with which it begins."""
    spans = [[piece.origin, len(piece.token_ids), piece.turn] for piece in branch if len(piece.token_ids)]
    skip = prompt_tokens
    while skip:  # the prompt is no span
        spans[0][1], skip = max(spans[0][1] - skip, 0), max(skip - spans[0][1], 0)
        spans = spans if spans[0][1] else spans[1:]
    return Rollout.of(
        join_columns([piece.sampled.columns for piece in branch if piece.sampled is not None]),
        token_ids=ids_of(branch)[prompt_tokens:],
        finish_reason=finish_reason,
        spans=np.array(spans, np.int32),
        trajectory=trajectory,
    )


def beginning(branch: Sequence[Piece], text: str) -> tuple[list[Piece], str]:
    """(the pieces with which `text` begins, what follows them)"""
    for number, piece in enumerate(branch):
        if not text.startswith(piece.text):
            return list(branch[:number]), text
        text = text[len(piece.text) :]
    return list(branch), text


def ids_of(pieces: Sequence[Piece]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *(piece.token_ids for piece in pieces)])
