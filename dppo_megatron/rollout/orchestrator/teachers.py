"""Ask teachers for the most likely tokens at every sampled token in a group, before the group is stored.

If the policy teaches itself, `Sampler` chooses an engine as for samples. All other teachers are stock servers.
After a failure a request goes to the teacher's next server, for at most `distillation.unavailable_timeout_s`. A reply
without valid distributions is requested again, as often as `INVALID` allows. A rejected request or a different
tokenizer ends the run.
Groups that are not scored are not in the bank, so a resumed run samples their prompts again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np

from dppo_megatron.common.retry import RetryBudget, retry_async
from dppo_megatron.config import Config
from dppo_megatron.data.prompts import PromptRow, renderer
from dppo_megatron.data.rows import column
from dppo_megatron.rollout.engines import protocol
from dppo_megatron.rollout.engines.http import EngineCalls, decoded
from dppo_megatron.rollout.engines.kinds import kind_of
from dppo_megatron.rollout.engines.samples import check_lists
from dppo_megatron.rollout.engines.secret import read_secret
from dppo_megatron.rollout.engines.teachers import teacher_config
from dppo_megatron.rollout.fleet.registry import engine_services
from dppo_megatron.rollout.fleet.sampling import Sampler
from dppo_megatron.run_dir import RunDir
from dppo_megatron.types import Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

INVALID = RetryBudget(attempts=8, first_pause_s=0.1)  # for replies that are not distributions
MAX_REQUESTS = 32  # limit of concurrent requests to a teacher
WARN_EVERY_S = 30.0  # a restarting teacher fails thousands of requests; a warning counts them
TIMEOUT_REMEDY = " (distillation.request_timeout_s)"
PROBE = "Żółw 12+34 = 46; naïve 東京 def f(x):\n\treturn x ** 2  # 😀"
Scores = dict[str, np.ndarray]  # columns for all sequence tokens after the first, named like engine columns


def teacher_prompt(
    config: Config, name: str, tokenizer: PreTrainedTokenizerBase, prompt: Prompt | PromptRow
) -> list[int]:
    """Return the tokens before a response as teacher `name` reads them. Raises `EngineIncompatible`."""
    if (template := config.distillation.teachers[name].prompt_template) is None:
        return prompt.token_ids.tolist()
    data = config.data.model_copy(update={"prompt_template": template.replace("{answer}", prompt.answer)})
    (text,) = renderer(tokenizer, data)([column(prompt.columns, data.prompt_column, "data.prompt_column")])
    if isinstance(text, ValueError):
        raise protocol.EngineIncompatible(f"distillation.teachers.{name}.prompt_template: {text}")
    return tokenizer.encode(text, add_special_tokens=not data.chat_template)


class Teachers:
    """Adds the teacher's columns to groups of samples; `close` ends the connections.

    `sampler` scores if the policy teaches itself.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int, sampler: Sampler):
        self._sampler = sampler
        self._config, self._settings = config, config.distillation
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._configs = {name: teacher_config(config, name) for name in self._settings.teachers}
        self._slots = {name: asyncio.Semaphore(MAX_REQUESTS) for name in self._settings.teachers}
        self._calls: dict[tuple[str, str], EngineCalls] = {}  # by teacher and URL
        self._verified: set[EngineCalls] = set()  # servers with the policy's tokens
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._repeated: Counter[str] = Counter()  # by teacher, since its last warning
        self._next_warning: defaultdict[str, float] = defaultdict(float)  # by teacher, time.monotonic()

    async def close(self) -> None:
        await asyncio.gather(*(calls.close() for calls in self._calls.values()))

    async def add(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """Return a group's samples with teacher_logprob, teacher_ids and teacher_topk_logprob.

        Equal samples are scored once. Raises `EngineError` naming the teacher if it does not score them.
        """
        if (name := self._settings.teacher_of(prompt.source)) is None:
            raise protocol.EngineIncompatible(
                f"distillation.teachers: none has rows of source {prompt.source!r}; add it to the sources of one"
            )
        opening = await asyncio.to_thread(teacher_prompt, self._config, name, self._tokenizer, prompt)
        responses = {r.token_ids.tobytes(): r.token_ids.tolist() for r in rollouts if len(r.versions)}
        requests = [self._ask(name, prompt, [*opening, *tokens]) for tokens in responses.values()]
        scores = dict(zip(responses, await asyncio.gather(*requests), strict=True))
        empty_scores = _checked([0], self._settings.topk, [], [])  # of a trajectory without a turn
        return tuple(self._with_columns(name, r, scores.get(r.token_ids.tobytes(), empty_scores)) for r in rollouts)

    def take_metrics(self) -> dict[str, float]:
        """Return means over the tokens that each teacher scored since the last call, and how many requests repeated."""
        sums, metrics = self._sums, {"teacher/retried_requests": self._sums["retried"]}
        for name in self._settings.teachers:
            if tokens := sums[f"{name}/tokens"]:
                metrics |= {
                    f"teacher/{name}/{metric}": sums[f"{name}/{metric}"] / tokens for metric in ("kl", "tail_mass")
                }
        sums.clear()
        return metrics

    async def _ask(self, name: str, prompt: Prompt, tokens: list[int]) -> Scores:
        """Return the scores for a sequence from the first server that answers."""
        setting, turn = f"distillation.teachers.{name}", itertools.count(prompt.position)

        def repeated(error: Exception) -> None:
            self._sums["retried"] += 1
            self._repeated[name] += 1
            if (now := time.monotonic()) >= self._next_warning[name]:
                self._next_warning[name] = now + WARN_EVERY_S
                repeats = f"{self._repeated.pop(name)} requests since the last warning"
                log.warning("%s: asked again, %s, now about prompt %d: %s", setting, repeats, prompt.position, error)

        async def attempt(_: int) -> Scores:
            async with self._slots[name]:
                return await self._score(name, prompt, tokens, next(turn))

        async def valid(_: int) -> Scores:
            return await retry_async(attempt, INVALID, on=protocol.InvalidSample, on_retry=repeated)

        limit_s = self._settings.unavailable_timeout_s
        budget = RetryBudget(timeout_s=limit_s, first_pause_s=0.1, longest_pause_s=15.0, jitter=True)
        final = protocol.EngineRefused, protocol.EngineIncompatible, protocol.InvalidSample
        try:
            return await retry_async(valid, budget, on=protocol.EngineError, unless=final, on_retry=repeated)
        except protocol.EngineError as error:
            need = f"list distillation.topk = {self._settings.topk} tokens (vLLM: --max-logprobs) and sample one more"
            problem = f"{setting}: it does not score the {len(tokens)} tokens of prompt {prompt.position}"
            raise type(error)(f"{problem}: {error}; it must {need}; then resume the run") from None

    async def _score(self, name: str, prompt: Prompt, tokens: list[int], turn: int) -> Scores:
        teacher, server_config, k = self._settings.teachers[name], self._configs[name], self._settings.topk
        if not (teacher.urls or teacher.path):
            ids, request_id = np.array(tokens, np.int32), f"teacher-{prompt.position}-{uuid4().hex}"
            request = protocol.GenerateRequest(request_id, ids, 1, (0,), 1.0, 1, topk=k, scored=True)
            (scored,) = await self._sampler.generate(request)
            return scored.columns
        if not (services := list(engine_services(server_config, RunDir(server_config.run.dir)).values())):
            raise protocol.EngineUnavailable(f"no server is registered in {server_config.run.dir}; see its log")
        url, kind = services[turn % len(services)].url, kind_of(server_config)
        service_keys = {(name, service.url) for service in services}
        for stale_key in [key for key in self._calls if key[0] == name and key not in service_keys]:
            await self._calls.pop(stale_key).close()  # a restarted server has another port
        if (name, url) not in self._calls:
            secret = None if teacher.urls and teacher.secret_file is None else read_secret(server_config)
            self._calls[name, url] = EngineCalls(url, secret, f"is it a {server_config.engine.kind} server?")
        calls, action = self._calls[name, url], f"scoring of {len(tokens)} tokens"
        path, body = kind.lists_request(tokens, k)
        limit_s = self._settings.request_timeout_s
        try:
            if teacher.urls and calls not in self._verified:
                await self._verify(calls, prompt)
            self._verified.add(calls)
            reply = await calls.call(action, path, limit_s, body=body, timeout_remedy=TIMEOUT_REMEDY)
            return await decoded(
                lambda text: _checked(tokens, k, *kind.decode_lists(json.loads(text), tokens, k)), reply
            )
        except protocol.EngineError:
            self._verified.discard(calls)  # another server may answer there next
            raise
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise protocol.InvalidSample(f"engine {url}: {action}: invalid reply: {error!r}") from None

    async def _verify(self, calls: EngineCalls, prompt: Prompt) -> None:
        """Raise `EngineIncompatible` if the server encodes text to other ids than the policy's tokenizer."""
        text = prompt.text + PROBE
        policy_ids = self._tokenizer.encode(text, add_special_tokens=False)
        body, limit_s = {"prompt": text, "add_special_tokens": False}, self._settings.request_timeout_s
        reply = await calls.json("its tokenizer", "/tokenize", limit_s, body=body, timeout_remedy=TIMEOUT_REMEDY)
        if (tokens := reply.get("tokens")) != policy_ids:
            raise protocol.EngineIncompatible(
                f"engine {calls.url} has another tokenizer than model.path: {PROBE!r} ends in {str(tokens)[-60:]}, not "
                f"{str(policy_ids)[-60:]}, so its log-probs are of other tokens; use a teacher of the same family"
            )

    def _with_columns(self, name: str, rollout: Rollout, scores: Scores) -> Rollout:
        last = len(scores["topk_ids"]) - len(rollout.token_ids)
        rows = slice(last, None) if rollout.sampled is None else last + np.flatnonzero(rollout.sampled)
        logprob, ids, topk = (scores[key][rows] for key in ("rollout_logprob", "topk_ids", "rollout_topk_logprob"))
        valid_mask = ids < self._vocab_size  # other ids belong to a padded embedding
        if (counts := rollout.sampling_mask_counts) is not None:  # tokens outside the mask belong to the rest
            first = np.arange(len(ids)) * self._vocab_size
            valid_mask &= np.isin(first[:, None] + ids, np.repeat(first, counts) + rollout.sampling_mask_ids)
        self._sums[f"{name}/tokens"] += len(ids)
        self._sums[f"{name}/kl"] += float((rollout.rollout_logprob - logprob).sum(dtype=np.float64))
        self._sums[f"{name}/tail_mass"] += float((1 - np.exp(topk.astype(np.float64)).sum(axis=1)).sum())
        ids = np.where(valid_mask, ids, -1).astype(np.int32)
        return replace(rollout, teacher_logprob=logprob, teacher_ids=ids, teacher_topk_logprob=topk)


def _checked(tokens: list[int], k: int, logprobs: list, lists: list) -> Scores:
    """Return the values of `EngineKind.decode_lists` as arrays. Raises `InvalidSample` and ValueError."""
    pairs, target_ids = np.array(lists, np.float64).reshape(len(tokens) - 1, k, 2), np.array(tokens[1:], np.int32)
    scores = {"rollout_logprob": np.array(logprobs, np.float32), "topk_ids": pairs[:, :, 0].astype(np.int32)}
    scores["rollout_topk_logprob"] = pairs[:, :, 1].astype(np.float32)
    check_lists("its list", target_ids, scores)
    return scores
