"""Prompts in, finished groups into the bank: samples, scores and bounds the staleness of every group.

The bank is the only state. Which prompts are done, and how many groups the trainer can count on, is read from it, so
an orchestrator that is killed and started again loses at most the groups that were being sampled, and its seeds
make it sample those the same again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.types import Prompt, RolloutGroup

from .engine import GenerateRequest, SpoiltSample
from .engine_pool import EnginePool
from .evaluation import Evaluator
from .published import POLL_S, PublishedFollower
from .rollout_metrics import StepRecorder

log = logging.getLogger(__name__)

SPOILT_ATTEMPTS = 3


class Orchestrator:
    """Fills the bank with `train.steps * rollout.prompts_per_step` groups, then evaluates the last policy.

    Group number g belongs to training step s = g // prompts_per_step and is sampled by a policy of at least version
    s - rollout.max_staleness: with 0, the batch of a step is sampled by exactly the weights that it will update.
    """

    def __init__(
        self,
        config: Config,
        *,
        engines: EnginePool,
        prompts,
        tokenizer,
        rewards,
        bank,
        published: PublishedFollower,
        evaluator: Evaluator | None,
        recorder: StepRecorder,
        stop_token_ids: Sequence[int],
    ):
        self._config = config
        self._engines = engines
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._bank = bank
        self._published = published
        self._evaluator = evaluator
        self._recorder = recorder
        self._stop_token_ids = tuple(stop_token_ids)

    async def run(self) -> None:
        """Raises `PolicyTimeout` when the trainer stops publishing and `EngineError` when an engine fails."""
        rollout = self._config.rollout
        wanted = self._config.train.steps * rollout.prompts_per_step
        positions = self._open_positions()
        running: set[asyncio.Task] = set()
        try:
            while (finished := self._bank.num_train_groups) < wanted:
                step = min(finished + len(running), wanted - 1) // rollout.prompts_per_step
                needed = max(0, step - rollout.max_staleness)
                if not running:
                    await self._published.wait_for(needed)
                await self._evaluate_if_due()
                while self._may_start(finished + len(running), wanted, len(running)):
                    self._recorder.started((finished + len(running)) // rollout.prompts_per_step)
                    running.add(asyncio.create_task(self._produce(next(positions))))
                done, running = await asyncio.wait(
                    running,
                    timeout=POLL_S if rollout.max_staleness else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    self._finish(task.result())
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        await self._published.wait_for(self._config.train.steps)
        await self._evaluate_if_due()

    def _open_positions(self) -> Iterator[int]:
        done = self._bank.done_positions()
        return (position for position in itertools.count() if position not in done)

    def _may_start(self, group: int, wanted: int, running: int) -> bool:
        rollout = self._config.rollout
        policy = self._published.current
        return (
            group < wanted
            and running < rollout.max_concurrent_groups
            and policy is not None
            and policy.version >= group // rollout.prompts_per_step - rollout.max_staleness
        )

    def _finish(self, group: RolloutGroup) -> None:
        rollout = self._config.rollout
        index = self._bank.num_train_groups
        self._recorder.finished(index // rollout.prompts_per_step, group)
        self._bank.append(group)

    async def _produce(self, position: int) -> RolloutGroup:
        prompt = self._prompts.prompt(position)
        rollouts = await self._sample(prompt)
        texts = self._tokenizer.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True)
        rewards, failed = await self._rewards.score(prompt, texts)
        return RolloutGroup(prompt, rollouts, rewards, failed, self._config.rollout.temperature)

    async def _sample(self, prompt: Prompt):
        rollout = self._config.rollout
        for attempt in range(SPOILT_ATTEMPTS):
            seeds = np.random.SeedSequence([self._config.run.seed, prompt.position, attempt])
            request = GenerateRequest(
                request_id=f"group-{prompt.position}-{attempt}",
                token_ids=prompt.token_ids,
                n=rollout.group_size,
                seeds=tuple(int(s) >> 1 for s in seeds.generate_state(rollout.group_size)),
                temperature=rollout.temperature,
                max_tokens=rollout.max_response_tokens,
                stop_token_ids=self._stop_token_ids,
                topk=rollout.topk_logprobs,
            )
            try:
                return await self._engines.generate(request)
            except SpoiltSample as error:
                self._recorder.spoilt()
                log.warning("prompt %d: refused a spoilt sample (%s); sampling again", prompt.position, error)
        raise SpoiltSample(
            f"prompt {prompt.position}: the engine spoilt the group {SPOILT_ATTEMPTS} times; see its log"
        )

    async def _evaluate_if_due(self) -> None:
        policy = self._published.current
        if self._evaluator is None or policy is None or not self._evaluator.due(policy.version):
            return
        accuracy = await self._evaluator.evaluate(policy.version, self._engines.generate)
        log.info(
            "policy version %d: greedy accuracy %.4f on %d held-out prompts",
            policy.version,
            accuracy,
            self._evaluator.num_prompts,
        )
