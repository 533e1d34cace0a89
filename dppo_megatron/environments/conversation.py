"""Turn the messages of a user's agent into tokens: a tree, because agents edit histories and send parallel requests."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate

import numpy as np

from dppo_megatron.types import ENVIRONMENT, POLICY, Rollout

from .dialogue import Codec, Piece, beginning, ids_of, inherited, put, readable
from .tool_messages import ChatMessage, Render, assistant_message, render_turns
from .tools import Tool, ToolCall, opened_reasoning, parse_turn


class RequestRejected(Exception):
    """A request of an agent was rejected; the message gives the reason. Other requests are not affected."""


@dataclass(frozen=True)
class TurnRequest:
    """Describes one request of an agent. `max_tokens` limits the answer; None means the run's limit."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    max_tokens: int | None = None


@dataclass(frozen=True)
class Turn:
    """Describes one turn of the policy as an agent receives it. `name` is derived from the tokens before the turn."""

    name: str
    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    truncated: bool
    prompt_tokens: int
    tokens: int

    def call_id(self, number: int) -> str:
        return self.calls[number].named(self.name, number)

    @property
    def message(self) -> ChatMessage:
        """Return the message that an agent sends back for this turn."""
        return assistant_message(self.content, ((self.call_id(i), call) for i, call in enumerate(self.calls)))


Sample = Callable[[np.ndarray, int | None], Awaitable[Rollout]]
"""(tokens before the turn [P] int32, its token limit) -> the turn, already on disk. Raises `RequestRejected`."""


class Conversation:
    """Answers all requests of one agent, as the branches of one trajectory.

    A request continues the longest sampled history with which its text begins, and the rest of its text is tokenized. A
    turn that the agent sends back is written exactly as it was sampled, reasoning included. The turn is found by the
    preceding messages, else as the only turn with that visible text. If several such turns differ in their reasoning, a
    later turn that followed one of them decides. Without a later turn, the message is written as the agent sent it.
    """

    def __init__(self, codec: Codec, render: Render, sample: Sample, no_tools: str | None = None):
        """Begin without a turn. With `no_tools`, requests with tools are rejected for that reason."""
        self._codec = codec
        self._render = render
        self._sample = sample
        self._no_tools = no_tools
        self.branches: list[list[Piece]] = []  # each branch ends with a turn
        self.turns = 0
        self.admitted = 0  # turns that are finished or being sampled
        self.opening: int | None = None  # tokens before the turn that was admitted first
        # "length": the last turn was truncated or rejected at the limit; "max_turns": a turn was rejected at the limit
        self.finish_reason = "stop"
        self._said: dict[str, list[list[ChatMessage]]] = {}  # key of a history or turn -> its messages as sampled
        self._undelivered: dict[str, Turn] = {}  # name -> turn

    def finished(self) -> list[list[Piece]]:
        """Return the branches as they are stored."""
        return self.branches

    async def ask(self, ask: TurnRequest) -> Turn:
        """Return the next turn. Raises `RequestRejected`, and the errors of sampling."""
        if ask.max_tokens is not None and not (type(ask.max_tokens) is int and ask.max_tokens > 0):
            raise RequestRejected(f"at most {ask.max_tokens!r} tokens: expected a positive integer")
        if ask.tools and self._no_tools:
            raise RequestRejected(f"tools: {self._no_tools}")
        written, path = self._as_sampled(ask.messages)
        try:
            text = render_turns(lambda messages: self._render(messages, ask.tools), written, ask.messages)
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        text = text.encode(errors="backslashreplace").decode()  # tokenizers reject half of a surrogate pair
        branch, known = self._history(text)
        kept = branch[:known]
        rest = put(self._codec, kept[-1].turn if kept else 0, text[sum(len(piece.text) for piece in kept) :])
        behind = ids_of([*kept, *rest])
        if not (ask.messages and len(behind)):
            raise RequestRejected("the request has no message; send at least one")
        name = blake2b(behind.data, digest_size=8).hexdigest()
        if (undelivered := self._undelivered.pop(name, None)) is not None:
            return undelivered
        sampled = await self._sample(behind, ask.max_tokens)
        if len(branch) > known:  # an earlier request of this agent continued differently from here
            branch = inherited(kept)
        if not any(branch is other for other in self.branches):
            self.branches.append(branch)
        whole = self._codec.decode(sampled.token_ids, skip_special_tokens=False)
        branch += [*rest, Piece(POLICY, self.turns, whole, sampled.token_ids, sampled)]
        self.turns += 1
        turn, raw = self._parsed(name, len(behind), sampled, opened_reasoning(text), ask)
        for key, sent in ((_key(path, turn.message), [*written, raw]), (_key("", turn.message), [raw])):
            if sent not in (variants := self._said.setdefault(key, [])):
                variants.append(sent)
        return turn

    def hung_up(self, turn: Turn) -> None:
        """Keep a turn that the agent did not receive: the same request returns it later."""
        self._undelivered[turn.name] = turn

    def _parsed(
        self, name: str, before: int, sampled: Rollout, opened: str, ask: TurnRequest
    ) -> tuple[Turn, ChatMessage]:
        if self.finish_reason != "max_turns":  # set while this turn was sampled
            self.finish_reason = sampled.finish_reason
        truncated = sampled.finish_reason == "length"
        ids = sampled.token_ids if truncated else sampled.token_ids[:-1]
        shown = parse_turn(opened + readable(self._codec, ids), bool(ask.tools), ask.tools)
        turn = Turn(name, *shown, truncated, before, len(sampled.token_ids))
        return turn, {"role": "assistant", "content": self._codec.decode(ids, skip_special_tokens=False)}

    def _as_sampled(self, messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], str]:
        """Return the messages with turns exactly as they were sampled, and the key of this history."""
        keys = list(accumulate(messages, _key, initial=""))
        known = next((n for n in range(len(messages), 0, -1) if len(self._said.get(keys[n], ())) == 1), 0)
        written = list(self._said[keys[known]][0]) if known else []
        for message in messages[known:]:
            turns = self._said.get(_key("", message), ())
            written += turns[0] if len(turns) == 1 else [message]
        return written, keys[-1]

    def _history(self, text: str) -> tuple[list[Piece], int]:
        """Return the branch that shares most tokens with the text, and its number of pieces to the last common turn."""
        best: tuple[list[Piece], int] = [], 0
        most = 0
        for branch in self.branches:
            known = len(beginning(branch, text)[0])
            while known and branch[known - 1].origin == ENVIRONMENT:
                known -= 1
            size = sum(len(piece.token_ids) for piece in branch[:known])
            if size > most:
                best, most = (branch, known), size
        return best


def _key(before: str, message: ChatMessage) -> str:
    """Return the key of a message after the history with key `before`, regardless of reasoning."""
    if message["role"] == "assistant":
        calls = [(call.get("id"), call["function"]) for call in message.get("tool_calls") or ()]
        message = {"turn": [(message.get("content") or "").strip(), calls]}
    return blake2b(json.dumps([before, message], sort_keys=True).encode(), digest_size=16).hexdigest()
