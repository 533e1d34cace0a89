"""Groups of trajectories: the policy and the environment take turns, token by token as the engine sampled them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.data.prompts import prompt_messages, render_chat
from dppo_megatron.data.rows import column
from dppo_megatron.engines.protocol import GenerateRequest
from dppo_megatron.engines.samples import absent_experts
from dppo_megatron.rewards import RewardPool
from dppo_megatron.types import COLUMNS, ENVIRONMENT, Prompt, Rollout, RolloutGroup

from .conversation import Conversation, Refused
from .dialogue import Dialogue, Piece, Render, as_rollout, common_beginning, opening_tokens, readable
from .interface import EnvironmentFailed, EnvironmentNameError
from .journals import Journals, Turns
from .pool import EnvironmentPool, Session
from .trajectory import Attempt, Gateway, Seat, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Sample = Callable[[Callable[[int], GenerateRequest], str], Awaitable[tuple[Rollout, ...]]]
"""As `fleet.sampling.Sampler.sample`."""


def training_request(
    config: Config, prompt: Prompt, name: str, seeds: Sequence[int], stop_token_ids: Sequence[int]
) -> GenerateRequest:
    """Return the request for the group of a training prompt, as `rollout` of the config asks for it."""
    rollout = config.rollout
    return GenerateRequest(
        request_id=name,
        token_ids=prompt.token_ids,
        n=rollout.group_size,
        seeds=tuple(seeds),
        temperature=rollout.temperature,
        max_tokens=rollout.max_response_tokens,
        stop_token_ids=tuple(stop_token_ids),
        topk=rollout.topk_logprobs,
        routed_experts=rollout.routing_replay,
        **rollout.mask_request,
    )


class Episodes:
    """Plays the environment of the config. Raises what sampling raises; what an environment does costs a trajectory."""

    def __init__(
        self,
        config: Config,
        *,
        sample: Sample,
        environments: EnvironmentPool,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[dict[str, Any]],
        stop_token_ids: Sequence[int],
        routing: tuple[int, int] | None,
        journals: Journals | None = None,
        gateway: Gateway | None = None,
    ):
        """routing: (layers with experts, experts of a token) of the model, where the config wants routes. journals:
        where the turns of training prompts are kept until the bank has their group. gateway: of an agent."""
        self._config = config
        self._sample = sample
        self.environments = environments
        self._tokenizer = tokenizer
        self._render: Render | None = None
        if config.data.chat_template:
            self._render = lambda messages: render_chat(tokenizer, messages, tools)
            self._render_with = partial(render_chat, tokenizer)
            asked = [{"role": "user", "content": "?"}]
            if tools and self._render(asked) == render_chat(tokenizer, asked):
                log.warning("the chat template shows no tools: the policy is not told of those of the environment")
        self._stop_token_ids = tuple(stop_token_ids)
        self._routing = routing
        self._journals = journals
        self._gateway = gateway
        self._begun = itertools.count()  # groups
        self._counts: Counter[str] = Counter()
        self._told = False

    async def play(self, prompt: Prompt, rewards: RewardPool) -> RolloutGroup:
        """The group of a training prompt. rewards: where the environment gives none."""
        order = next(self._begun)
        rollout = self._config.rollout
        seeds = np.random.SeedSequence([self._config.run.seed, prompt.position]).generate_state(rollout.group_size)
        request = training_request(self._config, prompt, f"group-{prompt.position}", seeds, self._stop_token_ids)
        turns = [Turns() for _ in request.seeds]
        if self._journals is not None:
            turns = await self._journals.turns(prompt.position, request.n, rollout.temperature)
        return self._group(prompt, await self._play_all(prompt, request, rewards, turns, order, recorded=True))

    async def play_request(self, prompt: Prompt, request: GenerateRequest, rewards: RewardPool) -> list[Trajectory]:
        """`request.n` trajectories that are not trained on, as `request` says of their first turn."""
        turns = [Turns() for _ in request.seeds]
        return await self._play_all(prompt, request, rewards, turns, next(self._begun), recorded=False)

    async def _play_all(
        self,
        prompt: Prompt,
        request: GenerateRequest,
        rewards: RewardPool,
        turns: list[Turns],
        order: int,
        recorded: bool,
    ) -> list[Trajectory]:
        name = request.request_id
        firsts = [replace(request, request_id=f"{name}.{i}", n=1, seeds=(s,)) for i, s in enumerate(request.seeds)]
        seats = [Seat(prompt, first, rewards, own, order, recorded) for first, own in zip(firsts, turns, strict=True)]
        playing = [asyncio.create_task(self._trajectory(seat)) for seat in seats]
        try:
            return await asyncio.gather(*playing)
        finally:
            for task in playing:  # where one failed, the others
                task.cancel()

    def take_metrics(self) -> dict[str, float]:
        """Of the trajectories since the last call."""
        played = max(self._counts["trajectories"], 1)
        metrics = {"environment/turns_mean": self._counts["turns"] / played}
        metrics["environment/max_turns_share"] = self._counts["max_turns"] / played
        metrics["environment/rewritten_histories"] = float(self._counts["rewritten"])
        metrics["environment/replayed_turns"] = float(self._counts["replayed"])
        self._counts.clear()
        return metrics | self.environments.take_metrics()

    async def _trajectory(self, seat: Seat) -> Trajectory:
        """What a failed environment leaves: the turns before it, without a reward.

        Where its process died, a new one is led by its seed and the turns so far to where it was, once.
        """
        trajectory, failure = await self._attempt(seat)
        if failure is not None and failure.reason == "died":
            log.warning("environment of prompt row %d died (%s): it is replayed", seat.prompt.row, failure)
            seat.turns.rewind()
            trajectory, failure = await self._attempt(seat)
        if failure is not None:
            self.environments.count(seat.prompt, failure)
        return trajectory

    async def _attempt(self, seat: Seat) -> tuple[Trajectory, EnvironmentFailed | None]:
        attempt, failed = Attempt(), None
        longest = self._config.environment.trajectory_timeout_s
        async with self.environments.session(seat.order) as session:
            try:
                async with asyncio.timeout(longest) as clock:
                    await (self._alternate if self._gateway is None else self._converse)(seat, session, attempt)
                    if attempt.reward is None:
                        attempt.reward = await self._reward_of_text(seat, attempt.branches)
            except EnvironmentFailed as failure:
                attempt.reward, failed = None, failure
            except TimeoutError:
                if not clock.expired():
                    raise
                attempt.reward = None
                failed = EnvironmentFailed("timeout", f"longer than environment.trajectory_timeout_s = {longest} s")
        if seat.recorded:
            self._counts.update(trajectories=1, turns=0 if attempt.played is None else attempt.played.turns)
            self._counts["max_turns"] += attempt.finish_reason == "max_turns"
        rewards = attempt.turn_rewards
        keeps = self._config.objective.credit == "turn" or any(value is not None for value in rewards)
        given = [value or 0.0 for value in rewards] if keeps else []
        return Trajectory(attempt.branches, attempt.finish_reason, attempt.reward, given), failed

    async def _converse(self, seat: Seat, session: Session, attempt: Attempt) -> None:
        """Answers the requests of an agent until it returns."""
        assert self._gateway is not None
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asked = itertools.count()

        async def sample(behind: np.ndarray, most: int | None) -> Rollout:
            try:
                return await self._turn(seat, next(asked), behind, self._left(seat, conversation, behind, most))
            except Refused:
                raise
            except Exception as error:  # of engines or the disk: it ends the run, and not this request alone
                if not broken.done():
                    broken.set_exception(error)
                raise Refused("the run cannot go on; its log says why") from None

        conversation = attempt.played = Conversation(self._tokenizer, self._render_with, sample)
        async with self._gateway.session(conversation) as key:
            agent = asyncio.ensure_future(session.run_agent(seat.prompt, self._gateway.url, key))
            try:
                await asyncio.wait((agent, broken), return_when=asyncio.FIRST_COMPLETED)
            finally:
                agent.cancel()
        if broken.done():
            broken.result()
        attempt.reward = agent.result()
        attempt.finish_reason = conversation.finish_reason
        if seat.turns.left:
            raise EnvironmentFailed("replay", "the agent does not ask again what it asked before a process died")
        if not conversation.branches:
            raise EnvironmentFailed("raised", "the agent returned without a turn of the policy")

    def _left(self, seat: Seat, conversation: Conversation, behind: np.ndarray, most: int | None) -> int:
        """Tokens that a turn may have. Raises `Refused`."""
        limits, longest = self._config.environment, self._config.data.max_prompt_tokens
        if conversation.turns >= limits.max_turns:
            conversation.finish_reason = "max_turns"
            raise Refused(f"environment.max_turns = {limits.max_turns}: this trajectory has had them")
        opening = len(opening_tokens(conversation.branches[0])) if conversation.branches else len(behind)
        if opening > longest:
            raise Refused(f"context_length_exceeded: {opening} tokens, data.max_prompt_tokens = {longest}")
        left = seat.first.max_tokens - (len(behind) - opening)
        if left < 1:
            conversation.finish_reason = "length"
            raise Refused(
                f"context_length_exceeded: {len(behind) - opening} tokens after the prompt, "
                f"rollout.max_response_tokens = {seat.first.max_tokens}"
            )
        return min(left, limits.max_turn_tokens or left, most or left)

    async def _alternate(self, seat: Seat, session: Session, attempt: Attempt) -> None:
        """Takes turns with an environment."""
        dialogue = attempt.played = await self._begin(seat, session)
        attempt.finish_reason = await self._play(seat, session, dialogue, attempt.turn_rewards)
        over, rewards = attempt.finish_reason == "stop", attempt.turn_rewards
        if self._config.objective.credit == "turn" and over and all(value is None for value in rewards):
            raise EnvironmentNameError(
                f"objective.credit = turn: {self._config.environment.described} gave no turn of prompt "
                f"{seat.prompt.position} a reward; let `step` return 0.0 for a turn that earned nothing, or set credit "
                "to trajectory"
            )
        attempt.reward = await session.finish()

    async def _begin(self, seat: Seat, session: Session) -> Dialogue:
        prompt, data = seat.prompt, self._config.data
        seed = int(np.random.SeedSequence([self._config.run.seed, prompt.position]).generate_state(1)[0])
        opening = await session.reset(prompt, seed)
        messages: list[dict[str, Any]] = []
        text, ids = prompt.text + (opening or ""), prompt.token_ids
        if self._render is not None:
            messages = prompt_messages(column(prompt.columns, data.prompt_column, "data.prompt_column"), data)
            if opening:
                last = messages[-1]
                messages = [*messages[:-1], {**last, "content": f"{last['content']}{opening}"}]
                text = self._render(messages)
        if opening:
            encoded = self._tokenizer.encode(text, add_special_tokens=self._render is None)
            if len(encoded) > data.max_prompt_tokens:
                raise EnvironmentFailed(
                    "raised",
                    f"what reset says makes a prompt of {len(encoded)} tokens, data.max_prompt_tokens is "
                    f"{data.max_prompt_tokens}",
                )
            ids = np.array(encoded, np.int32)
        return Dialogue.begin(self._tokenizer, self._render, messages, Piece(ENVIRONMENT, 0, text, ids))

    async def _play(self, seat: Seat, session: Session, dialogue: Dialogue, turn_rewards: list[float | None]) -> str:
        """Takes turns until it is over; returns the finish reason."""
        limits = self._config.environment
        for turn in range(limits.max_turns):
            behind = dialogue.token_ids
            prompt_tokens = len(opening_tokens(dialogue.branches[0]))
            left = seat.first.max_tokens - (len(behind) - prompt_tokens)
            if left < 1:
                return "length"
            sampled = await self._turn(seat, turn, behind, min(left, limits.max_turn_tokens or left))
            dialogue.add_turn(sampled)
            turn_rewards.append(None)
            if sampled.finish_reason == "length":
                return "length"
            step = await session.step(readable(self._tokenizer, sampled.token_ids))
            turn_rewards[-1] = step.reward
            if step.done:
                return "stop"
            try:
                rewritten = dialogue.answer(step.messages)
            except ValueError as error:  # of the chat template
                raise EnvironmentFailed("raised", f"what it says to turn {turn}: {error}") from None
            if rewritten:
                self._say_rewritten()
        return "max_turns"

    async def _turn(self, seat: Seat, turn: int, behind: np.ndarray, tokens: int) -> Rollout:
        """A turn that was finished before, or a new one, which is on disk when this returns."""
        if (finished := seat.turns.take(behind)) is not None:
            self._counts["replayed"] += 1
            return finished
        if seat.turns.left and self._gateway is None:
            raise EnvironmentFailed(
                "replay", f"turn {turn}: it does not say again what it said before the process that played it died"
            )
        request = partial(self._request, seat, turn, behind, tokens)
        (sampled,) = await self._sample(request, f"prompt {seat.prompt.position}, turn {turn}")
        await seat.turns.add(behind, sampled)
        return sampled

    def _request(self, seat: Seat, turn: int, behind: np.ndarray, tokens: int, attempt: int) -> GenerateRequest:
        seed = np.random.SeedSequence([*seat.first.seeds, turn, attempt]).generate_state(1, np.uint64)[0]
        return replace(
            seat.first,
            request_id=f"{seat.first.request_id}.{turn}-{attempt}",
            token_ids=behind,
            seeds=(int(seed) >> 1,),
            max_tokens=tokens,
        )

    def _say_rewritten(self) -> None:
        self._counts["rewritten"] += 1
        if not self._told:
            self._told = True
            log.warning(
                "the chat template writes earlier turns otherwise than they were sampled (thinking removed, white "
                "space): from there on a trajectory is a branch of its own, which is trained on beside the ones "
                "before. environment/rewritten_histories counts them"
            )

    async def _reward_of_text(self, seat: Seat, branches: list[list[Piece]]) -> float | None:
        """What `reward:` gives the last turn; None where the verifier failed."""
        last = max((p for branch in branches for p in branch if p.sampled is not None), key=lambda p: p.turn)
        text = self._tokenizer.decode(last.token_ids, skip_special_tokens=True)
        (reward,), (failed,) = await seat.rewards.score(seat.prompt, [text], recorded=seat.recorded)
        return None if failed else float(reward)

    def _group(self, prompt: Prompt, played: Sequence[Trajectory]) -> RolloutGroup:
        """What all branches begin with is the group's prompt; without tokens of a policy it is the prompt's own."""
        branches = [branch for trajectory in played for branch in trajectory.branches]
        token_ids = common_beginning([opening_tokens(branch) for branch in branches] or [prompt.token_ids])
        if not len(token_ids):
            raise EnvironmentNameError(
                f"{self._config.environment.described}: trajectories of prompt {prompt.position} begin with different "
                "tokens, so the group has no prompt; what `reset` or an agent says first, and how the chat template "
                "begins, may not change"
            )
        if not np.array_equal(token_ids, prompt.token_ids):
            prompt = replace(prompt, token_ids=token_ids, text=self._tokenizer.decode(token_ids))
        rollouts: list[Rollout] = []
        owners: list[Trajectory] = []
        for number, trajectory in enumerate(played):
            rows = [as_rollout(branch, len(token_ids), "stop", number) for branch in trajectory.branches]
            rows = rows or [self._nothing(len(token_ids), number)]
            rows[-1] = replace(rows[-1], finish_reason=trajectory.finish_reason)
            rollouts += rows
            owners += [trajectory] * len(rows)
        turn_rewards = None
        if any(trajectory.turn_rewards for trajectory in played):
            turn_rewards = tuple(np.array(trajectory.turn_rewards, np.float32) for trajectory in played)
        return RolloutGroup(
            prompt,
            tuple(rollouts),
            np.array([owner.reward or 0.0 for owner in owners], np.float32),
            np.array([owner.reward is None for owner in owners]),
            self._config.rollout.temperature,
            turn_rewards,
        )

    def _nothing(self, prompt_tokens: int, trajectory: int) -> Rollout:
        """A trajectory whose environment failed before its first turn."""
        rollout = self._config.rollout
        asked = {"topk": rollout.topk_logprobs, "sampling_mask": rollout.has_sampling_mask}
        columns = {
            c.name: np.zeros((0, *(rollout.topk_logprobs for _ in c.shape)), c.dtypes[0])
            for c in COLUMNS
            if c.rows != "read" and (not c.asked_by or asked[c.asked_by])
        }
        if self._routing is not None:
            columns["routed_experts"] = absent_experts(prompt_tokens, *self._routing)
        return Rollout.of(columns, token_ids=np.zeros(0, np.int32), finish_reason="abort", trajectory=trajectory)
