"""Turn an agent's messages into a tree of tokens, because agents edit histories and send parallel requests."""

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
from .tools import Tool, ToolCall, opened_reasoning, turn_parts


class RequestRejected(Exception):
    """An agent's request was rejected; the message gives the reason. Other requests are not affected."""


@dataclass(frozen=True)
class TurnRequest:
    """Describes an agent's request. `max_tokens` limits the answer; None means the run's limit."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    max_tokens: int | None = None


@dataclass(frozen=True)
class Turn:
    """Describes a policy turn as an agent receives it. `name` is derived from the tokens before the turn."""

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
"""(tokens before the turn [P] int32, token limit) -> the turn, already on disk. Raises `RequestRejected`."""


class Conversation:
    """Answers all requests of an agent; they form the branches of a trajectory.

    A request continues the longest sampled history that the request text begins with; the remaining text is tokenized.
    A turn that the agent sends back is written exactly as it was sampled, reasoning included. The turn is found by the
    preceding messages, else as the only turn with that visible text. If several matching turns differ in reasoning, a
    later turn that followed one of them decides. Without a later turn, the message is written as the agent sent it.
    """

    def __init__(self, codec: Codec, render: Render, sample: Sample, no_tools: str | None = None):
        """Begin without a turn. If `no_tools` is set, requests with tools are rejected for that reason."""
        self._codec = codec
        self._render = render
        self._sample = sample
        self._no_tools = no_tools
        self.branches: list[list[Piece]] = []  # each branch ends with a turn
        self.turns = self.calls = self.call_errors = 0
        self.admitted = 0  # turns that are finished or being sampled
        self.opening: int | None = None  # tokens before the first admitted turn
        # "length": the last turn was truncated or rejected at the limit; "max_turns": a turn was rejected at the limit
        self.finish_reason = "stop"
        self._sampled: dict[str, list[list[ChatMessage]]] = {}  # history or turn key -> messages as sampled
        self._undelivered: dict[str, Turn] = {}  # name -> turn

    def finished(self) -> list[list[Piece]]:
        """Return the branches as they are stored."""
        return self.branches

    async def ask(self, ask: TurnRequest) -> Turn:
        """Return the next turn. Raises `RequestRejected`, and sampling errors."""
        if ask.max_tokens is not None and not (type(ask.max_tokens) is int and ask.max_tokens > 0):
            raise RequestRejected(f"at most {ask.max_tokens!r} tokens: expected a positive integer")
        if ask.tools and self._no_tools:
            raise RequestRejected(f"tools: {self._no_tools}")
        sampled_messages, history_key = self._as_sampled(ask.messages)
        try:
            text = render_turns(lambda messages: self._render(messages, ask.tools), sampled_messages, ask.messages)
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        text = text.encode(errors="backslashreplace").decode()  # tokenizers reject half of a surrogate pair
        branch, num_common = self._history(text)
        prefix = branch[:num_common]
        rest = put(self._codec, prefix[-1].turn if prefix else 0, text[sum(len(piece.text) for piece in prefix) :])
        context_ids = ids_of([*prefix, *rest])
        if not (ask.messages and len(context_ids)):
            raise RequestRejected("the request has no message; send at least one")
        name = blake2b(context_ids.data, digest_size=8).hexdigest()
        if (undelivered_turn := self._undelivered.pop(name, None)) is not None:
            return undelivered_turn
        sampled = await self._sample(context_ids, ask.max_tokens)
        if len(branch) > num_common:  # an earlier request continued differently from here
            branch = inherited(prefix)
        if not any(branch is other for other in self.branches):
            self.branches.append(branch)
        turn_text = self._codec.decode(sampled.token_ids, skip_special_tokens=False)
        branch += [*rest, Piece(POLICY, self.turns, turn_text, sampled.token_ids, sampled)]
        self.turns += 1
        turn, raw = self._parsed(name, len(context_ids), sampled, opened_reasoning(text), ask)
        for key, variant in (
            (_key(history_key, turn.message), [*sampled_messages, raw]),
            (_key("", turn.message), [raw]),
        ):
            if variant not in (variants := self._sampled.setdefault(key, [])):
                variants.append(variant)
        return turn

    def hung_up(self, turn: Turn) -> None:
        """Keep a turn that the agent did not receive: the same request returns it later."""
        self._undelivered[turn.name] = turn

    def _parsed(
        self, name: str, prompt_tokens: int, sampled: Rollout, opened: str, ask: TurnRequest
    ) -> tuple[Turn, ChatMessage]:
        if self.finish_reason != "max_turns":  # set while this turn was sampled
            self.finish_reason = sampled.finish_reason
        truncated = sampled.finish_reason == "length"
        ids = sampled.token_ids if truncated else sampled.token_ids[:-1]
        text = opened + readable(self._codec, ids)
        reasoning, content, calls = turn_parts(text, bool(ask.tools), ask.tools)
        valid = tuple(call for call in calls if not call.problem)
        self.calls += len(calls)
        self.call_errors += len(calls) - len(valid)
        turn = Turn(name, reasoning, content, valid, truncated, prompt_tokens, len(sampled.token_ids))
        return turn, {"role": "assistant", "content": self._codec.decode(ids, skip_special_tokens=False)}

    def _as_sampled(self, messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], str]:
        """Return the messages with turns exactly as they were sampled, and the history key."""
        keys = list(accumulate(messages, _key, initial=""))
        num_stored = next((n for n in range(len(messages), 0, -1) if len(self._sampled.get(keys[n], ())) == 1), 0)
        sampled_messages = list(self._sampled[keys[num_stored]][0]) if num_stored else []
        for message in messages[num_stored:]:
            turns = self._sampled.get(_key("", message), ())
            sampled_messages += turns[0] if len(turns) == 1 else [message]
        return sampled_messages, keys[-1]

    def _history(self, text: str) -> tuple[list[Piece], int]:
        """Return the branch that shares most tokens with the text, and the number of pieces to the last common turn."""
        best: tuple[list[Piece], int] = [], 0
        best_size = 0
        for branch in self.branches:
            num_common = len(beginning(branch, text)[0])
            while num_common and branch[num_common - 1].origin == ENVIRONMENT:
                num_common -= 1
            size = sum(len(piece.token_ids) for piece in branch[:num_common])
            if size > best_size:
                best, best_size = (branch, num_common), size
        return best


def _key(history_key: str, message: ChatMessage) -> str:
    """Return the key of the history `history_key` extended by a message; reasoning does not change the key."""
    if message["role"] == "assistant":
        calls = [(call.get("id"), call["function"]) for call in message.get("tool_calls") or ()]
        message = {"turn": [(message.get("content") or "").strip(), calls]}
    return blake2b(json.dumps([history_key, message], sort_keys=True).encode(), digest_size=16).hexdigest()
