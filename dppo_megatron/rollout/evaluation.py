"""Greedy evaluation on held-out prompts by the engines that serve the policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.observability.tail import read_records
from dppo_megatron.types import Prompt, Rollout

from .engine import GenerateRequest
from .rollout_metrics import append_record

Generate = Callable[[GenerateRequest], Awaitable[tuple[Rollout, ...]]]


class Evaluator:
    """Scores every held-out prompt once, greedily, at the versions that are due: first, last, and every `eval.every`.

    Results are appended to the rollout metrics with the policy version as their step; a version that already has a
    result is not evaluated again, so a resumed run does not repeat itself.
    """

    def __init__(self, config: Config, *, prompts, tokenizer, rewards, stop_token_ids: Sequence[int], output: Path):
        self._config = config
        self._prompts: list[Prompt] = [prompts.prompt(position) for position in range(len(prompts))]
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._stop_token_ids = tuple(stop_token_ids)
        self._output = output
        self._done = {record["step"] for record in read_records(output) if "eval/accuracy" in record}

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def due(self, version: int) -> bool:
        every = self._config.eval.every
        at_ends = version in (0, self._config.train.steps)
        return version not in self._done and (at_ends or (every > 0 and version % every == 0))

    async def evaluate(self, version: int, generate: Generate) -> float:
        """Returns the mean reward of the greedy answers; a failed verifier counts as 0."""
        started = time.monotonic()
        gate = asyncio.Semaphore(self._config.rollout.max_concurrent_groups)

        async def score(prompt: Prompt) -> tuple[float, int]:
            async with gate:
                rollouts = await generate(self._request(version, prompt))
            texts = self._tokenizer.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True)
            rewards, failed = await self._rewards.score(prompt, texts)
            return float(rewards[0]) * (not failed[0]), len(rollouts[0].token_ids)

        scores = np.array(await asyncio.gather(*map(score, self._prompts)))
        accuracy, tokens = scores.mean(axis=0)
        append_record(
            self._output,
            {
                "step": version,
                "eval/accuracy": float(accuracy),
                "eval/response_tokens_mean": float(tokens),
                "eval/prompts": len(self._prompts),
                "time/eval_s": time.monotonic() - started,
            },
        )
        self._done.add(version)
        return float(accuracy)

    def _request(self, version: int, prompt: Prompt) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"eval-{version}-{prompt.position}",
            token_ids=prompt.token_ids,
            n=1,
            seeds=(self._config.run.seed,),
            temperature=0.0,
            max_tokens=self._config.eval.max_response_tokens or self._config.rollout.max_response_tokens,
            stop_token_ids=self._stop_token_ids,
            topk=0,
        )
