"""Greedy evaluation on held-out prompts by the engines that serve the policy."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.engines.protocol import GenerateRequest
from dppo_megatron.fleet.sampling import Sampler
from dppo_megatron.observability.tail import read_records
from dppo_megatron.types import Prompt

from .metrics import append_record, show_progress

log = logging.getLogger(__name__)


class Evaluator:
    """Scores every held-out prompt once, greedily, at the versions that are due: first, last, and every `eval.every`.

    Results are appended to the rollout metrics. Their step is the oldest policy version that gave a token of any
    answer; it is the version that was due unless newer ones were published before the first or before the last answer.
    A version that already has a result is not evaluated again, so a resumed run does not repeat itself.
    """

    def __init__(self, config: Config, *, prompts, tokenizer, rewards, stop_token_ids: Sequence[int], output: Path):
        self._config = config
        self._prompts: list[Prompt] = [prompts.prompt(position) for position in range(len(prompts))]
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._stop_token_ids = tuple(stop_token_ids)
        self._output = output
        self._begun = {record["step"] for record in read_records(output) if "eval/accuracy" in record}
        self._gate = asyncio.Semaphore(config.rollout.max_concurrent_groups)  # of all evaluations together

    def due(self, version: int) -> bool:
        every = self._config.eval.every
        at_ends = version in (0, self._config.train.steps)
        return version not in self._begun and (at_ends or (every > 0 and version % every == 0))

    def start(self, version: int, sampler: Sampler) -> asyncio.Task[float]:
        """A task that returns the mean reward of the greedy answers; a failed verifier counts as 0. Raises as
        `Sampler.sample`. From now on `version` is not due any more."""
        self._begun.add(version)
        # Their tasks exist from here on, so their requests go before those of all groups that are begun later.
        answers = asyncio.gather(*(self._answer(version, prompt, sampler) for prompt in self._prompts))
        return asyncio.create_task(self._record(answers))

    async def _record(self, running: asyncio.Future[list[_Answer]]) -> float:
        started = time.monotonic()
        answers = await running
        oldest, newest = min(a.oldest for a in answers), max(a.newest for a in answers)
        accuracy = float(np.mean([a.reward for a in answers]))
        append_record(
            self._output,
            {
                "step": oldest,
                "eval/accuracy": accuracy,
                "eval/response_tokens_mean": float(np.mean([a.tokens for a in answers])),
                "eval/prompts": len(answers),
                "eval/version_spread": newest - oldest,
                "time/eval_s": time.monotonic() - started,
            },
        )
        self._begun.add(oldest)
        versions = f"version {oldest}" if newest == oldest else f"versions {oldest} to {newest}"
        log.info("policy %s: greedy accuracy %.4f on %d held-out prompts", versions, accuracy, len(answers))
        return accuracy

    async def _answer(self, version: int, prompt: Prompt, sampler: Sampler) -> _Answer:
        async with self._gate:
            (rollout,) = await sampler.sample(
                lambda attempt: self._request(version, prompt, attempt), f"held-out prompt {prompt.position}"
            )
        (text,) = self._tokenizer.batch_decode([rollout.token_ids], skip_special_tokens=True)
        (reward,), (failed,) = await self._rewards.score(prompt, [text], recorded=False)
        show_progress(self._output)
        oldest, newest = int(rollout.versions.min()), int(rollout.versions.max())
        return _Answer(float(reward) * (not failed), len(rollout.token_ids), oldest, newest)

    def _request(self, version: int, prompt: Prompt, attempt: int) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"eval-{version}-{prompt.position}-{attempt}",
            token_ids=prompt.token_ids,
            n=1,
            seeds=(self._config.run.seed,),
            temperature=0.0,
            max_tokens=self._config.eval.max_response_tokens or self._config.rollout.max_response_tokens,
            stop_token_ids=self._stop_token_ids,
            topk=0,
        )


@dataclass(frozen=True, slots=True)
class _Answer:
    reward: float  # 0 where the verifier failed
    tokens: int
    oldest: int  # policy version of any token
    newest: int
