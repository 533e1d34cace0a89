"""Ask teachers for their most likely tokens at every sampled token of a group, before the group is stored.

| event | request | limit |
|---|---|---|
| server dies, times out, fails | sent to the teacher's next server | `distillation.unavailable_timeout_s` |
| reply is not of these tokens, or no distribution | the same | `INVALID_ATTEMPTS`, then the run ends |
| server rejects it or has another tokenizer | not repeated: the run ends with the error | |

A group stays in memory meanwhile. If the run ends, its prompt is not in the bank, so a resumed run samples it again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from dppo_megatron.common.retry import RetryBudget, retry_async
from dppo_megatron.config import Config
from dppo_megatron.config.distillation import TeacherConfig
from dppo_megatron.data.prompts import renderer
from dppo_megatron.data.rows import column
from dppo_megatron.engines.http import EngineCalls, decoded
from dppo_megatron.engines.kinds import KINDS
from dppo_megatron.engines.protocol import (
    EngineError,
    EngineIncompatible,
    EngineRefused,
    EngineUnavailable,
    InvalidSample,
)
from dppo_megatron.engines.samples import GroupSamples
from dppo_megatron.engines.serving import ScoredTokens
from dppo_megatron.types import Prompt, Rollout

log = logging.getLogger(__name__)

INVALID_ATTEMPTS = 8  # replies to one request that are no distributions over its tokens
REQUEST_TOKENS = 8192  # a request has more only if one sequence has
PROBE = "Żółw 12+34 = 46; naïve 東京 def f(x):\n\treturn x ** 2  # 😀"
ANY_ID = 2**31 - 1


@dataclass
class _Teacher:
    name: str
    settings: TeacherConfig
    kind: str
    secret: str | None
    started: Callable[[], Sequence[str]]  # its servers now, without urls
    slots: asyncio.Semaphore
    turn: Any = field(default_factory=itertools.count)
    calls: dict[str, EngineCalls] = field(default_factory=dict)
    verified: set[str] = field(default_factory=set)  # servers with the policy's tokens


class Teachers:
    """Adds the teacher's columns to samples. `close` ends its connections.

    started: URLs of a teacher's servers that the run knows, by the teacher's name. secret: of these servers.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        vocab_size: int,
        started: Callable[[str], Sequence[str]],
        secret: str | None,
    ):
        self._config = config
        self._chosen = chosen = config.distillation
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._teachers = {
            name: _Teacher(
                name,
                teacher,
                teacher.kind or config.engine.kind,
                teacher.secret_file.read_text().strip() if teacher.secret_file else None if teacher.urls else secret,
                partial(started, name),
                asyncio.Semaphore(chosen.max_requests),
            )
            for name, teacher in chosen.teachers.items()
        }

    async def close(self) -> None:
        for teacher in self._teachers.values():
            for calls in teacher.calls.values():
                await calls.close()

    async def add(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """Return the samples of one group with teacher_logprob, teacher_ids and teacher_topk_logprob.

        Equal samples are scored once. Raises `EngineError` naming the teacher when it cannot score them.
        """
        name = self._chosen.of_source(prompt.source)
        if name is None:
            raise EngineIncompatible(f"distillation.teachers: none for the data source {prompt.source!r}")
        teacher = self._teachers[name]
        opening = await asyncio.to_thread(self._opening, teacher, prompt)
        wanted = {r.token_ids.tobytes(): [*opening, *r.token_ids.tolist()] for r in rollouts if len(r.versions)}
        pieces: list[list[bytes]] = [[]]
        size = 0
        for key, sequence in wanted.items():
            if pieces[-1] and size + len(sequence) > REQUEST_TOKENS:
                pieces, size = [*pieces, []], 0
            pieces[-1].append(key)
            size += len(sequence)
        asked = [piece for piece in pieces if piece]
        replies = await asyncio.gather(*(self._ask(teacher, prompt, [wanted[key] for key in piece]) for piece in asked))
        scored = {
            key: found
            for piece, reply in zip(asked, replies, strict=True)
            for key, found in zip(piece, reply, strict=True)
        }
        return tuple(self._with_columns(name, r, scored.get(r.token_ids.tobytes())) for r in rollouts)

    def take_metrics(self) -> dict[str, float]:
        """Return the means of each teacher over the tokens that it scored since the last call, and its failures."""
        sums, metrics = self._sums, {"teacher/retried_requests": self._sums["retried"]}
        for name in self._teachers:
            if tokens := sums[f"{name}/tokens"]:
                metrics[f"teacher/{name}/kl"] = sums[f"{name}/kl"] / tokens
                metrics[f"teacher/{name}/tail_mass"] = sums[f"{name}/tail_mass"] / tokens
        sums.clear()
        return metrics

    def _opening(self, teacher: _Teacher, prompt: Prompt) -> list[int]:
        """Return the tokens before a response as the teacher reads them."""
        template, data = teacher.settings.prompt_template, self._config.data
        if template is None:
            return prompt.token_ids.tolist()
        data = data.model_copy(update={"prompt_template": template.replace("{answer}", prompt.answer)})
        value = column(prompt.columns, data.prompt_column, "data.prompt_column")
        (text,) = renderer(self._tokenizer, data)([value])
        if isinstance(text, ValueError):
            raise EngineIncompatible(f"distillation.teachers.{teacher.name}.prompt_template: row {prompt.row}: {text}")
        return self._tokenizer.encode(text, add_special_tokens=not data.chat_template)

    async def _ask(self, teacher: _Teacher, prompt: Prompt, sequences: list[list[int]]) -> list[ScoredTokens]:
        """Return the scores of sequences from the first server that answers."""
        invalid, first, setting = 0, next(teacher.turn), f"distillation.teachers.{teacher.name}"

        async def attempt(number: int) -> list[ScoredTokens]:
            nonlocal invalid
            async with teacher.slots:
                urls = teacher.settings.urls or teacher.started()
                if not urls:
                    raise EngineUnavailable(f"{setting}: no server of it answers yet; see its log")
                url = urls[(first + number) % len(urls)]
                try:
                    return await self._score(teacher, url, prompt, sequences)
                except EngineError as error:
                    teacher.verified.discard(url)  # another server may answer there next
                    invalid += isinstance(error, InvalidSample)
                    raise

        def count(error: Exception) -> None:
            self._sums["retried"] += 1
            log.warning("asking teacher %s again about prompt %d: %s", teacher.name, prompt.position, error)

        budget = RetryBudget(
            timeout_s=self._chosen.unavailable_timeout_s, first_pause_s=0.1, longest_pause_s=15.0, jitter=True
        )
        fatal = (EngineRefused, EngineIncompatible)
        try:
            return await retry_async(
                attempt,
                budget,
                on=EngineError,
                unless=fatal,
                give_up=lambda: invalid >= INVALID_ATTEMPTS,
                on_retry=count,
            )
        except EngineError as error:
            advice = "resume the run when it answers"
            if isinstance(error, EngineRefused):
                advice = (
                    f"it must return distillation.topk = {self._chosen.topk} log-probs of prompt tokens (vLLM: "
                    "--max-logprobs), and read one token more than the longest prompt and response"
                )
            raise type(error)(f"{setting}: prompt {prompt.position} is not scored: {error}; {advice}") from None

    async def _score(
        self, teacher: _Teacher, url: str, prompt: Prompt, sequences: list[list[int]]
    ) -> list[ScoredTokens]:
        if url not in teacher.calls:
            teacher.calls[url] = EngineCalls(url, teacher.secret, f"is it a {teacher.kind} server?")
        calls, kind, k = teacher.calls[url], KINDS[teacher.kind], self._chosen.topk
        if teacher.settings.urls and url not in teacher.verified:
            await self._verify(teacher, calls, prompt)
            teacher.verified.add(url)
        what = f"scoring of {len(sequences)} sequences"
        path, body = kind.lists_request(sequences, k)
        remedy = " (distillation.request_timeout_s)"
        reply = await calls.call(what, path, self._chosen.request_timeout_s, body=body, timeout_remedy=remedy)

        def checked(reply: bytes | bytearray) -> list[ScoredTokens]:
            found = kind.decode_lists(reply, sequences, k)
            for tokens, scores in zip(sequences, found, strict=True):
                if scores.ids.shape != (len(tokens) - 1, k):
                    raise ValueError(f"lists of shape {scores.ids.shape}, expected {(len(tokens) - 1, k)}")
                columns = {"rollout_logprob": scores.logprob, "topk_ids": scores.ids}
                columns["rollout_topk_logprob"] = scores.topk_logprob
                own = np.array(tokens[1:], np.int32)
                GroupSamples(np.array([len(own)]), ("stop",), own, columns).check_lists(what, ANY_ID)
            return found

        try:
            return await decoded(checked, reply)
        except InvalidSample as error:
            raise InvalidSample(f"{url}: {error}") from None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise InvalidSample(f"{url}: {what}: the reply lacks or garbles {error!r}") from None

    async def _verify(self, teacher: _Teacher, calls: EngineCalls, prompt: Prompt) -> None:
        """Raise `EngineIncompatible` if the server encodes text to other ids than the policy's tokenizer."""
        text = f"{prompt.text}{PROBE}"
        own = self._tokenizer.encode(text, add_special_tokens=False)
        asked = {"prompt": text, "add_special_tokens": False}
        tokens = (await calls.json("its tokenizer", "/tokenize", body=asked)).get("tokens")
        if tokens != own:
            raise EngineIncompatible(
                f"{calls.url} has another tokenizer than model.path: it encodes {PROBE!r} after the prompt's text as "
                f"{str(tokens)[-80:]}, the policy as {str(own)[-80:]}, so its log-probs are of other tokens; use a "
                "teacher of the same family"
            )

    def _with_columns(self, name: str, rollout: Rollout, scored: ScoredTokens | None) -> Rollout:
        k, size = self._chosen.topk, len(rollout.token_ids)
        if scored is None:  # nothing was sampled
            empty = np.zeros((0, k), np.int32)
            return replace(
                rollout,
                teacher_logprob=np.zeros(0, np.float32),
                teacher_ids=empty,
                teacher_topk_logprob=empty.astype(np.float32),
            )
        logprob, ids, topk = (values[len(values) - size :] for values in scored)
        if rollout.sampled is not None:
            logprob, ids, topk = logprob[rollout.sampled], ids[rollout.sampled], topk[rollout.sampled]
        ids = np.where(ids < self._vocab_size, ids, -1)  # rows of a padded embedding
        if rollout.sampling_mask_counts is not None:  # other tokens have no probability: they belong to the rest
            places = np.arange(len(ids)) * self._vocab_size
            kept = np.repeat(places, rollout.sampling_mask_counts) + rollout.sampling_mask_ids
            ids = np.where(np.isin(places[:, None] + ids, kept) & (ids >= 0), ids, -1)
        tail = 1.0 - np.exp(topk.astype(np.float64)).sum(axis=1)
        self._sums[f"{name}/tokens"] += len(ids)
        self._sums[f"{name}/kl"] += float((rollout.rollout_logprob - logprob).sum(dtype=np.float64))
        self._sums[f"{name}/tail_mass"] += float(tail.clip(min=0).sum())
        return replace(
            rollout,
            teacher_logprob=np.ascontiguousarray(logprob),
            teacher_ids=ids.astype(np.int32),
            teacher_topk_logprob=np.ascontiguousarray(topk),
        )
