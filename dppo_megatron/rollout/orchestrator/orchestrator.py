"""Fill the bank with finished groups: sample and score a group for each prompt, and bound its staleness.

As long as groups are missing, the loop takes every possible act. Group g belongs to step s; n is rollout.max_staleness.

    act        waits for                                                unblocked by
    begin      a policy of version s - n, and a place among             the trainer's publish of s - n, a finished group
               rollout.max_concurrent_groups
    evaluate   a policy that is due; with n = 0 the groups wait for it  the trainer's publish
    finish     engine, environment, reward, teacher                     another engine, if one dies
    keep       -                                                        (dynamic sampling drops groups without signal)
    store      with n > 0: groups that a step needs earlier             the trainer waits for the stored group

The bank is the only state: it determines which prompts are done, and how many groups the trainer can expect. A killed
and restarted orchestrator loses at most the running groups and the finished groups that wait for them, and equal seeds
make it sample these identically. With an environment it loses no finished turn, because it also reads the turn
journals.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dppo_megatron.bank import BankTimeout, BankWriter, EarlierSamples
from dppo_megatron.bank.journal import Journals
from dppo_megatron.config import Config
from dppo_megatron.data.prompts import PromptSource
from dppo_megatron.rollout.engines.byte_budget import ByteBudget
from dppo_megatron.rollout.engines.protocol import GenerateRequest
from dppo_megatron.rollout.environments.episodes import Episodes, training_requests
from dppo_megatron.rollout.fleet.sampling import Sampler
from dppo_megatron.rollout.rewards import RewardPool
from dppo_megatron.run_dir import RunDir
from dppo_megatron.types import Prompt, Rollout, RolloutGroup
from dppo_megatron.weights.published import PublishedFollower, PublishedPolicy

from .dynamic_sampling import NO_SIGNAL, SignalFilter, describe_drop
from .evaluation import Evaluator
from .metrics import StepRecorder
from .staleness import StalenessBound
from .teachers import Teachers
from .waiting import WaitingGroups

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

TOO_STALE = "too_stale"  # the reason in the bank
MAX_WRITES = 4  # no group is begun while more writes are pending
LONGEST_WRITE_S = 300.0
LOOK_S = 0.02  # interval of checks for a newer policy; it permits further groups


@dataclass(frozen=True, slots=True)
class Running:
    """Describes a group that is being sampled and scored."""

    prompt: Prompt
    last_step: int  # last step that may train on it


@dataclass(eq=False)
class Orchestrator:
    """Fills the bank with `train.steps * rollout.prompts_per_step` groups, then evaluates the last policy.

    Group number g belongs to training step s = g // prompts_per_step and is sampled by a policy of at least version s -
    rollout.max_staleness. With max_staleness 0, a step's batch is sampled by exactly the weights that the step updates.
    With a larger value, sampling continues while the trainer trains. If a group is not finished when the last step that
    may train on it needs it, rollout.beyond_bound decides whether this step waits, another prompt replaces the group,
    or a later step trains on it.
    A prompt is begun only when a group is certainly still missing. So with staleness 0 a run uses exactly the first
    prompts in the order, regardless of finish order and restarts.
    Evaluations run during sampling, or with staleness 0 before it, so that one policy gives all answers.
    """

    config: Config
    _: KW_ONLY
    sampler: Sampler
    prompts: PromptSource
    tokenizer: PreTrainedTokenizerBase
    rewards: RewardPool
    bank: BankWriter
    published: PublishedFollower
    evaluator: Evaluator | None
    recorder: StepRecorder
    stop_token_ids: Sequence[int]
    episodes: Episodes | None = None  # plays answers in turns
    teachers: Teachers | None = None  # score every group before it is stored
    journals: Journals | None = None  # stores the finished turns
    prompts_in_all: int | None = None  # groups to fill the bank with, by one policy; None = as many as a trainer needs
    budget: ByteBudget | None = None  # shared with the engine clients
    earlier: EarlierSamples | None = None  # drafts for the engines

    def __post_init__(self) -> None:
        rollout, episodes = self.config.rollout, self.episodes
        self._waiting = WaitingGroups(self.budget or ByteBudget(), RunDir(self.config.run.dir).bank)
        trajectory_failure = str if episodes is None else lambda: episodes.environments.frequent_failure
        self._filter = SignalFilter(rollout, lambda: self.rewards.last_failure, trajectory_failure)
        self._training_request = training_requests(self.config, self.stop_token_ids)
        self._evaluations: set[asyncio.Task] = set()  # running evaluations
        self._writes: deque[Future] = deque()  # pending writes, in order
        self._scoring: set[int] = set()  # positions of running groups that only wait for their teacher
        self._bound = StalenessBound(rollout.prompts_per_step, rollout.max_staleness)

    async def run(self) -> None:
        """Fill the bank, and evaluate.

        Raises `PolicyTimeout` when the trainer stops publishing, `EngineError` when an engine fails, `NoSignal` when
        dynamic sampling finds too few groups to train on, `NoReward` when all rewards fail, `BankError` when a group
        cannot be written.
        """
        rollout = self.config.rollout
        total_groups = self.prompts_in_all or self.config.train.steps * rollout.prompts_per_step
        positions = self._open_positions()
        running: dict[asyncio.Task, Running] = {}
        finished: list[tuple[int, RolloutGroup]] = []  # (last step, group), waiting for slower groups
        try:
            while (num_stored := self.bank.num_begun_groups) < total_groups:
                num_begun = num_stored + len(running) + len(finished)
                self._take_written()
                if not running:
                    await self._wait_for(self._bound.needed_version(min(num_begun, total_groups - 1)))
                await self._evaluate_if_due()
                max_running = rollout.max_concurrent_groups if len(self._writes) <= MAX_WRITES else 0
                while (
                    num_begun < total_groups
                    and len(running) - len(self._scoring) < max_running
                    and self._may_begin(num_begun)
                ):
                    self.recorder.count_started(num_begun // rollout.prompts_per_step)
                    prompt = self.prompts.prompt(next(positions))
                    last_step = self._bound.last_step(self._oldest_version(prompt, num_begun))
                    running[asyncio.create_task(self._produce(prompt))] = Running(prompt, last_step)
                    num_begun += 1
                done, _ = await asyncio.wait(
                    {*running, *self._evaluations},
                    timeout=LOOK_S if rollout.max_staleness or self.teachers else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done & self._evaluations:
                    self._evaluations.remove(task)
                    task.result()
                for task in done & running.keys():
                    last_step, group = running.pop(task).last_step, task.result()
                    if self._keep(group):
                        finished.append((last_step, group))
                self._store(finished, running)
            await self._wait_for(0 if self.prompts_in_all else self.config.train.steps)
            await asyncio.gather(*self._evaluations)
        finally:
            tasks = (*running, *self._evaluations)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._written()  # a stopped run also stores every finished group

    def _open_positions(self) -> Iterator[int]:
        done = self.bank.done_positions()
        return (position for position in itertools.count() if position not in done)

    def _version(self) -> int:
        """Return the published policy version; -1 before the first publish."""
        policy = self.published.current
        return -1 if policy is None else policy.version

    def _may_begin(self, group: int) -> bool:
        return self._version() >= self._bound.needed_version(group)

    def _oldest_version(self, prompt: Prompt, group: int) -> int:
        """Return the oldest policy version that group number `group` may contain.

        Turns from an earlier process count, if they are not too old for the group.
        """
        current, journals = self._version(), self.journals
        if journals is None or (oldest := journals.oldest_version(prompt.position)) is None:
            return current
        if oldest < self._bound.needed_version(group):
            log.warning("prompt %d: its turns of policy %d are too old now; it begins again", prompt.position, oldest)
            journals.remove(prompt.position)
            return current
        return min(oldest, current)

    def _store(self, finished: list[tuple[int, RolloutGroup]], running: dict[asyncio.Task, Running]) -> None:
        """Move finished groups to the bank, most urgent first, as long as no running group becomes too late."""
        finished.sort(key=lambda entry: entry[0])
        while finished:
            group = self.bank.num_begun_groups
            waiting = [last_step for last_step, _ in finished[1:]]
            if running and not self._may_store(group, waiting, running):
                return
            _, first = finished.pop(0)
            self.recorder.count_finished(group // self.config.rollout.prompts_per_step, first)
            self._write(first.prompt.position, self.bank.begin_append(first))

    def _write(self, position: int, record: Future) -> None:
        """Add a pending write. When it is done, free the group's memory and remove the prompt's journal."""
        self._writes.append(record)
        loop = asyncio.get_running_loop()

        def release(done: Future) -> None:  # called in the writer's thread
            with contextlib.suppress(RuntimeError):  # if the loop is closed
                loop.call_soon_threadsafe(self._waiting.release, position)
            if self.journals is not None and done.exception() is None:
                self.journals.remove(position)

        record.add_done_callback(release)

    def _take_written(self) -> None:
        """Raise the error of a finished write."""
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()

    async def _written(self) -> None:
        """Return once all stored groups are in the bank. Raises the error of a write."""
        while self._writes:
            done, _ = await asyncio.wait([asyncio.wrap_future(self._writes[0])], timeout=LONGEST_WRITE_S)
            if not done:
                problem = BankTimeout(
                    f"writing a group to the bank takes longer than {LONGEST_WRITE_S:g} s: the file system of run.dir "
                    "does not answer; check it, then resume"
                )
                log.error("%s", problem)  # at once, because closing the bank waits until the write returns
                raise problem
            done.pop().exception()  # raised below
            self._take_written()

    def _may_store(self, group: int, waiting: list[int], running: dict[asyncio.Task, Running]) -> bool:
        """Return whether a finished group may be stored as number `group` without making a running group too late.

        No running group is given up before the trainer needs it, because it may still finish.
        """
        step = group // self.config.rollout.prompts_per_step
        # A group that is already late, and will be trained on late, delays no other group.
        in_time = sorted((t for t in running if running[t].last_step >= step), key=lambda t: running[t].last_step)
        other_steps = [last_step for last_step in waiting if last_step >= step]
        too_late = self._bound.count_too_late(group, [running[task].last_step for task in in_time], other_steps)
        if not too_late:
            return True
        beyond_bound = self.config.rollout.beyond_bound
        if beyond_bound == "wait" or self._version() < step:
            return False
        if beyond_bound == "drop":
            for task in in_time[:too_late]:
                self._give_up(task, running.pop(task))
        return True

    def _give_up(self, task: asyncio.Task, late_group: Running) -> None:
        task.cancel()  # the engine aborts the request
        detail = f"not done when step {late_group.last_step} needed its last group, and no later step may train on it"
        position, row = late_group.prompt.position, late_group.prompt.row
        self._write(position, self.bank.begin_drop(position, row, TOO_STALE, detail))
        self.recorder.count_given_up()
        log.warning("prompt %d: given up, %s", late_group.prompt.position, detail)

    def _keep(self, group: RolloutGroup) -> bool:
        """Return whether the run trains on `group`; if not, record its prompt as dropped."""
        step = self.bank.num_begun_groups // self.config.rollout.prompts_per_step
        is_kept = self._filter.keeps(group, step)
        if not is_kept:
            self.recorder.count_dropped(step, group)
            position, row = group.prompt.position, group.prompt.row
            self._write(position, self.bank.begin_drop(position, row, NO_SIGNAL, describe_drop(group)))
        return is_kept

    async def _produce(self, prompt: Prompt) -> RolloutGroup:
        if self.episodes is not None:
            group = await self.episodes.play(prompt, self.rewards)
            group = replace(group, rollouts=await self._waiting.keep(prompt.position, group.rollouts))
            return await self._score(group)
        rollouts = await self._waiting.keep(prompt.position, await self._sample(prompt))
        texts = self.tokenizer.batch_decode([r.token_ids.tolist() for r in rollouts], skip_special_tokens=True)
        rewards, failed = await self.rewards.score(prompt, texts)
        return await self._score(RolloutGroup(prompt, rollouts, rewards, failed, self.config.rollout.temperature))

    async def _score(self, group: RolloutGroup) -> RolloutGroup:
        """Return the group with the teacher's columns. Meanwhile another group may be sampled."""
        position = group.prompt.position
        if self.teachers is not None:
            self._scoring.add(position)
            try:
                rollouts = await self.teachers.add(group.prompt, group.rollouts)
            finally:
                self._scoring.remove(position)
            self._waiting.release(position)
            group = replace(group, rollouts=await self._waiting.keep(position, rollouts))
        return group

    async def _sample(self, prompt: Prompt) -> Sequence[Rollout]:
        drafts = () if self.earlier is None else await asyncio.to_thread(self.earlier.samples, prompt)

        def request(attempt: int) -> GenerateRequest:
            words = np.random.SeedSequence([self.config.run.seed, prompt.position, attempt])
            seeds = [int(word) >> 1 for word in words.generate_state(self.config.rollout.group_size)]
            name = f"group-{prompt.position}-{attempt}"
            return self._training_request(request_id=name, token_ids=prompt.token_ids, seeds=seeds, drafts=drafts)

        return await self.sampler.sample(request, f"prompt {prompt.position}")

    async def _wait_for(self, version: int) -> None:
        """Wait for a policy of at least `version`, and start evaluations that become due meanwhile.

        The trainer may need a group that is still being written, so a failed write is raised at once.
        """
        waiting = asyncio.ensure_future(self._published_and_evaluated(version))
        try:
            await self._written()
            await waiting
        finally:
            waiting.cancel()

    async def _published_and_evaluated(self, version: int) -> None:
        for number in range(max(0, self._version()), version + 1):
            await self.published.wait_for(number)
            await self._evaluate_if_due()

    async def _evaluate_if_due(self) -> None:
        policy = self.published.current
        if self.evaluator is None or policy is None or not self.evaluator.due(policy.version):
            return
        evaluation = self.evaluator.start(policy.version, _identity(policy), self.sampler)
        if self.config.rollout.max_staleness == 0:  # before any group, so that the trainer cannot publish meanwhile
            await evaluation
        else:
            self._evaluations.add(evaluation)


def _identity(policy: PublishedPolicy) -> dict[str, object]:
    """Identify a policy by version and trainer scores, or publish time: after a resume, versions may repeat."""
    digest = zlib.crc32(json.dumps(policy.probe_logprobs).encode()) if policy.probe_logprobs else policy.published_at
    return {"version": policy.version, "scored": digest}
