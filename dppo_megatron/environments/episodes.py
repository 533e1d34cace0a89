"""Play groups of trajectories. Policy and environment take turns, and sampled tokens are never changed."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo_megatron.bank.journal import FinishedTurns, Journals
from dppo_megatron.common.deadline import time_limit
from dppo_megatron.config import Config
from dppo_megatron.data.prompts import prompt_messages, render_chat
from dppo_megatron.data.rows import column
from dppo_megatron.engines.protocol import GenerateRequest
from dppo_megatron.engines.samples import absent_experts
from dppo_megatron.objectives import build_objective
from dppo_megatron.rewards import RewardPool
from dppo_megatron.types import COLUMNS, ENVIRONMENT, Prompt, Rollout, RolloutGroup, expected_shapes

from .conversation import Conversation, RequestRejected
from .dialogue import Dialogue, Piece, Render, as_rollout, common_beginning, opening_tokens, readable
from .interface import EnvironmentFailed, EnvironmentNameError
from .pool import EnvironmentPool, Session
from .tool_messages import tools_problem
from .tools import opened_reasoning
from .trajectory import AgentGateway, Attempt, Trajectory, TrajectoryRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Sample = Callable[[Callable[[int], GenerateRequest], str], Awaitable[tuple[Rollout, ...]]]
"""As `fleet.sampling.Sampler.sample`."""


def training_requests(config: Config, stop_token_ids: Sequence[int]) -> Callable[..., GenerateRequest]:
    """Return a function that makes the request for a group of a training prompt from its id, token ids and seeds."""
    rollout, chosen = config.rollout, config.objective
    needed = build_objective(chosen.name, **chosen.settings).needs_columns
    flags = {c.asked_by for c in COLUMNS if c.name in needed} - {"", "teacher", *GenerateRequest.__dataclass_fields__}
    return partial(
        GenerateRequest,
        n=rollout.group_size,
        temperature=rollout.temperature,
        max_tokens=rollout.max_response_tokens,
        stop_token_ids=tuple(stop_token_ids),
        topk=rollout.topk_logprobs,
        routed_experts=rollout.routing_replay,
        flags=tuple(sorted(flags)),
        **rollout.mask_request,
    )


@dataclass(eq=False)
class Episodes:
    """Plays the environment of the config. Sampling errors are raised; errors of an environment fail one trajectory."""

    config: Config
    _: KW_ONLY
    sample: Sample
    environments: EnvironmentPool
    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[dict[str, Any]]
    stop_token_ids: Sequence[int]
    routing: tuple[int, int] | None  # layers with experts and experts of a token, if the config wants routes
    journals: Journals | None = None  # turns of training prompts, kept until the bank has their group
    gateway: AgentGateway | None = None  # set for an agent

    def __post_init__(self) -> None:
        tokenizer, tools = self.tokenizer, self.tools
        self._render: Render | None = None
        if self.config.data.chat_template:
            self._render = lambda messages: render_chat(tokenizer, messages, tools)
        self._no_tools = None if self.gateway is None else tools_problem(partial(render_chat, tokenizer))
        self._training_request = training_requests(self.config, self.stop_token_ids)
        self._begun = itertools.count()  # number of groups
        self._counts: Counter[str] = Counter()
        self._warned = False  # whether a rewritten history was reported

    async def play(self, prompt: Prompt, rewards: RewardPool) -> RolloutGroup:
        """Play the group of a training prompt. `rewards` scores it if the environment gives no reward."""
        order = next(self._begun)
        rollout = self.config.rollout
        seeds = np.random.SeedSequence([self.config.run.seed, prompt.position]).generate_state(rollout.group_size)
        request = self._training_request(request_id=f"group-{prompt.position}", token_ids=prompt.token_ids, seeds=seeds)
        turns = [FinishedTurns() for _ in request.seeds]
        if self.journals is not None:
            turns = await self.journals.turns(prompt.position, request.n, rollout.temperature)
        played = await self._play_all(prompt, request, rewards, turns, order, recorded=True)
        return self._group(prompt, request, played)

    async def play_request(self, prompt: Prompt, request: GenerateRequest, rewards: RewardPool) -> list[Trajectory]:
        """Play `request.n` trajectories that are not trained on; `request` describes their first turn."""
        turns = [FinishedTurns() for _ in request.seeds]
        return await self._play_all(prompt, request, rewards, turns, next(self._begun), recorded=False)

    async def _play_all(
        self,
        prompt: Prompt,
        request: GenerateRequest,
        rewards: RewardPool,
        turns: list[FinishedTurns],
        order: int,
        recorded: bool,
    ) -> list[Trajectory]:
        name = request.request_id
        firsts = [
            replace(request, request_id=f"{name}.{i}", n=1, seeds=(s,), affinity=(name, f"{name}.{i}"))
            for i, s in enumerate(request.seeds)
        ]
        all_wanted = [
            TrajectoryRequest(prompt, first, rewards, own, order, recorded)
            for first, own in zip(firsts, turns, strict=True)
        ]
        playing = [asyncio.create_task(self._trajectory(wanted)) for wanted in all_wanted]
        try:
            return await asyncio.gather(*playing)
        finally:
            for task in playing:  # if one trajectory failed, the others are still running
                task.cancel()

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the trajectories since the last call."""
        played = max(self._counts["trajectories"], 1)
        metrics = {"environment/turns_mean": self._counts["turns"] / played}
        metrics["environment/max_turns_share"] = self._counts["max_turns"] / played
        metrics["environment/rewritten_histories"] = float(self._counts["rewritten"])
        metrics["environment/replayed_turns"] = float(self._counts["replayed"])
        self._counts.clear()
        return metrics | self.environments.take_metrics()

    async def _trajectory(self, wanted: TrajectoryRequest) -> Trajectory:
        """Play one trajectory. After a failure of the environment it has the turns so far and no reward.

        If the environment's process died, a new process repeats the seed and the turns so far, once.
        """
        trajectory, failure = await self._attempt(wanted)
        if failure is not None and failure.reason == "died":
            log.warning("environment of prompt row %d died (%s): it is replayed", wanted.prompt.row, failure)
            wanted.turns.rewind()
            trajectory, failure = await self._attempt(wanted)
        if failure is not None:
            self.environments.count(wanted.prompt, failure)
        return trajectory

    async def _attempt(self, wanted: TrajectoryRequest) -> tuple[Trajectory, EnvironmentFailed | None]:
        attempt, failed = Attempt(), None
        longest = self.config.environment.trajectory_timeout_s
        async with self.environments.session(wanted.order) as session:
            try:
                async with time_limit(longest) as clock:
                    await (self._alternate if self.gateway is None else self._converse)(wanted, session, attempt)
                    if attempt.reward is None:
                        attempt.reward = await self._reward_of_text(wanted, attempt.branches)
            except EnvironmentFailed as failure:
                attempt.reward, failed = None, failure
            except TimeoutError:
                if not clock.expired():
                    raise
                attempt.reward = None
                failed = EnvironmentFailed("timeout", f"longer than environment.trajectory_timeout_s = {longest} s")
        if wanted.recorded:
            self._counts.update(trajectories=1, turns=0 if attempt.played is None else attempt.played.turns)
            self._counts["max_turns"] += attempt.finish_reason == "max_turns"
        rewards = attempt.turn_rewards
        keeps = self.config.objective.credit == "turn" or any(value is not None for value in rewards)
        given = [value or 0.0 for value in rewards] if keeps else []
        return Trajectory(attempt.branches, attempt.finish_reason, attempt.reward, given), failed

    async def _converse(self, wanted: TrajectoryRequest, session: Session, attempt: Attempt) -> None:
        """Answer the requests of an agent until it returns."""
        assert self.gateway is not None
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def sample(behind: np.ndarray, most: int | None) -> Rollout:
            try:
                turn, left = self._admit(wanted, conversation, behind)
                return await self._turn(wanted, turn, behind, min(left, most or left))
            except RequestRejected:
                raise
            except Exception as error:  # an error of engines or the disk ends the run, not only this request
                if not broken.done():
                    broken.set_exception(error)
                raise RequestRejected("the run cannot continue; its log has the reason") from None

        render = partial(render_chat, self.tokenizer)
        conversation = attempt.played = Conversation(self.tokenizer, render, sample, self._no_tools)
        async with self.gateway.session(conversation) as key:
            agent = asyncio.ensure_future(session.run_agent(wanted.prompt, self.gateway.url, key))
            try:
                await asyncio.wait((agent, broken), return_when=asyncio.FIRST_COMPLETED)
            finally:
                agent.cancel()
        if broken.done():
            broken.result()
        attempt.reward = agent.result()
        attempt.finish_reason = conversation.finish_reason
        if wanted.turns.left:
            raise EnvironmentFailed(
                "replay", "the agent does not repeat the requests from before a process died; make it deterministic"
            )
        if not conversation.branches:
            raise EnvironmentFailed("raised", "the agent returned without a turn of the policy")

    def _admit(self, wanted: TrajectoryRequest, conversation: Conversation, behind: np.ndarray) -> tuple[int, int]:
        """Return the number and the token limit of the next turn, which then counts. Raises `RequestRejected`.

        It does not wait, so requests in parallel cannot exceed the limits together.
        """
        longest, turn = self.config.data.max_prompt_tokens, conversation.admitted
        if turn >= self.config.environment.max_turns:
            conversation.finish_reason = "max_turns"
            raise RequestRejected(f"environment.max_turns = {turn}: this trajectory has used them")
        opening = len(behind) if conversation.opening is None else conversation.opening
        if opening > longest:
            raise RequestRejected(f"context_length_exceeded: prompt of {opening}, data.max_prompt_tokens = {longest}")
        left = self._left(wanted, opening, behind)
        if left < 1:
            conversation.finish_reason = "length"
            raise RequestRejected(
                f"context_length_exceeded: {len(behind) - opening} tokens after the prompt, "
                f"rollout.max_response_tokens = {wanted.first.max_tokens}"
            )
        conversation.admitted, conversation.opening = turn + 1, opening
        return turn, left

    def _left(self, wanted: TrajectoryRequest, opening: int, behind: np.ndarray) -> int:
        """Return the token limit of a turn, below 1 for none. `opening` counts the tokens before the first turn."""
        left = wanted.first.max_tokens - max(len(behind) - opening, 0)  # a later prompt may be shorter
        return min(left, self.config.environment.max_turn_tokens or left)

    async def _alternate(self, wanted: TrajectoryRequest, session: Session, attempt: Attempt) -> None:
        """Take turns with an environment."""
        dialogue = attempt.played = await self._begin(wanted, session)
        attempt.finish_reason = await self._play(wanted, session, dialogue, attempt.turn_rewards)
        over, rewards = attempt.finish_reason == "stop", attempt.turn_rewards
        if self.config.objective.credit == "turn" and over and all(value is None for value in rewards):
            raise EnvironmentNameError(
                f"objective.credit = turn: {self.config.environment.described} gave no turn of prompt "
                f"{wanted.prompt.position} a reward; let `step` return 0.0 for a turn that earned nothing, or set "
                "credit to trajectory"
            )
        attempt.reward = await session.finish()

    async def _begin(self, wanted: TrajectoryRequest, session: Session) -> Dialogue:
        prompt, data = wanted.prompt, self.config.data
        seed = int(np.random.SeedSequence([self.config.run.seed, prompt.position]).generate_state(1)[0])
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
            encoded = self.tokenizer.encode(text, add_special_tokens=self._render is None)
            if len(encoded) > data.max_prompt_tokens:
                raise EnvironmentFailed(
                    "raised",
                    f"the text of reset makes a prompt of {len(encoded)} tokens, data.max_prompt_tokens is "
                    f"{data.max_prompt_tokens}",
                )
            ids = np.array(encoded, np.int32)
        return Dialogue(self.tokenizer, self._render, messages, [[Piece(ENVIRONMENT, 0, text, ids)]])

    async def _play(
        self, wanted: TrajectoryRequest, session: Session, dialogue: Dialogue, turn_rewards: list[float | None]
    ) -> str:
        """Take turns until the trajectory is over; return the finish reason."""
        for turn in range(self.config.environment.max_turns):
            behind = dialogue.token_ids
            opened = opened_reasoning(dialogue.branches[-1][-1].text)
            left = self._left(wanted, len(opening_tokens(dialogue.branches[0])), behind)
            if left < 1:
                return "length"
            sampled = await self._turn(wanted, turn, behind, left)
            dialogue.add_turn(sampled)
            turn_rewards.append(None)
            if sampled.finish_reason == "length":
                return "length"
            step = await session.step(readable(self.tokenizer, sampled.token_ids), opened)
            turn_rewards[-1] = step.reward
            if step.done:
                return "stop"
            try:
                rewritten = dialogue.answer(step.messages)
            except ValueError as error:  # the chat template rejects them
                raise EnvironmentFailed("raised", f"its answer to turn {turn}: {error}") from None
            self._counts["rewritten"] += rewritten
            if rewritten and not self._warned:
                self._warned = True
                log.warning(
                    "the chat template changes earlier turns (it removes thinking or white space). A trajectory "
                    "continues from there as a new branch, which is trained on in addition to the earlier ones. "
                    "environment/rewritten_histories counts these branches"
                )
        return "max_turns"

    async def _turn(self, wanted: TrajectoryRequest, turn: int, behind: np.ndarray, tokens: int) -> Rollout:
        """Return a turn that was finished before, or sample a new turn and return it once it is on disk."""
        if (finished := wanted.turns.take(behind)) is not None:
            self._counts["replayed"] += 1
            return finished
        if wanted.turns.left and self.gateway is None:
            raise EnvironmentFailed(
                "replay",
                f"turn {turn}: it does not repeat its answers from before its process died; use its seed",
            )
        first = wanted.first

        def request(attempt: int) -> GenerateRequest:
            seed = np.random.SeedSequence([*first.seeds, turn, attempt]).generate_state(1, np.uint64)[0]
            name, seeds = f"{first.request_id}.{turn}-{attempt}", (int(seed) >> 1,)
            return replace(first, request_id=name, token_ids=behind, seeds=seeds, max_tokens=tokens)

        (sampled,) = await self.sample(request, f"prompt {wanted.prompt.position}, turn {turn}")
        await wanted.turns.add(behind, sampled)
        return sampled

    async def _reward_of_text(self, wanted: TrajectoryRequest, branches: list[list[Piece]]) -> float | None:
        """Return the last turn's reward from `reward:` of the config, or None if the verifier failed."""
        last = max((p for branch in branches for p in branch if p.sampled is not None), key=lambda p: p.turn)
        text = str(self.tokenizer.decode(last.token_ids, skip_special_tokens=True))
        (reward,), (failed,) = await wanted.rewards.score(wanted.prompt, [text], recorded=wanted.recorded)
        return None if failed else float(reward)

    def _group(self, prompt: Prompt, request: GenerateRequest, played: Sequence[Trajectory]) -> RolloutGroup:
        """Build the group; the common beginning of all branches is its prompt.

        Without sampled tokens, the prompt stays as it is. Example: [5, 7, 2] and [5, 7, 9] give [5, 7].
        """
        branches = [branch for trajectory in played for branch in trajectory.branches]
        token_ids = common_beginning([opening_tokens(branch) for branch in branches] or [prompt.token_ids])
        if not len(token_ids):
            raise EnvironmentNameError(
                f"{self.config.environment.described}: trajectories of prompt {prompt.position} begin with different "
                "tokens, so the group has no prompt; the first text of `reset` or an agent, and the beginning of the "
                "chat template, must not change"
            )
        if not np.array_equal(token_ids, prompt.token_ids):
            prompt = replace(prompt, token_ids=token_ids, text=str(self.tokenizer.decode(token_ids)))
        like = next((p.sampled.columns for branch in branches for p in branch if p.sampled is not None), {})
        rollouts: list[Rollout] = []
        owners: list[Trajectory] = []
        for number, trajectory in enumerate(played):
            rows = [as_rollout(branch, len(token_ids), "stop", number) for branch in trajectory.branches]
            rows = rows or [self._nothing(request, len(token_ids), number, like)]
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
            self.config.rollout.temperature,
            turn_rewards,
        )

    def _nothing(self, request: GenerateRequest, prompt_tokens: int, number: int, like: Mapping[str, Any]) -> Rollout:
        """Return the rollout of a trajectory without a turn, with dtypes and trailing shapes of `like`, if present."""
        sizes = zip("KLk", (request.topk, *(self.routing or ())), strict=False)
        shapes = expected_shapes({}, 0, prompt_tokens - 1, like, **dict(sizes))
        columns = {
            c.name: np.zeros(np.maximum(shapes[c.name], 0), getattr(like.get(c.name), "dtype", c.dtypes[0]))
            for c in COLUMNS
            if request.asks_for(c)
        }
        if self.routing is not None:
            columns["routed_experts"][:] = absent_experts(prompt_tokens, *self.routing)
        return Rollout.of(columns, token_ids=np.zeros(0, np.int32), finish_reason="abort", trajectory=number)
