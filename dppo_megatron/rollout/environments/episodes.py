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
from dppo_megatron.common.tasks import results_of
from dppo_megatron.config import Config
from dppo_megatron.data.prompts import prompt_messages, render_chat
from dppo_megatron.data.rows import column
from dppo_megatron.objectives import build_objective
from dppo_megatron.rollout.engines.protocol import GenerateRequest
from dppo_megatron.rollout.engines.samples import absent_experts
from dppo_megatron.rollout.rewards import RewardPool
from dppo_megatron.types import COLUMNS, ENVIRONMENT, Prompt, Rollout, RolloutGroup, expected_shapes

from .conversation import Conversation, RequestRejected
from .dialogue import Dialogue, Piece, Render, as_rollout, common_beginning, opening_tokens, readable
from .interface import CALL_ERROR, EnvironmentFailed, EnvironmentNameError
from .pool import EnvironmentPool, Session
from .tool_messages import tools_problem
from .tools import opened_reasoning
from .trajectory import AgentGateway, Attempt, Trajectory, TrajectoryRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Sample = Callable[[Callable[[int], GenerateRequest], str], Awaitable[tuple[Rollout, ...]]]
"""Has the signature of `fleet.sampling.Sampler.sample`."""


def training_requests(config: Config, stop_token_ids: Sequence[int]) -> Callable[..., GenerateRequest]:
    """Return a function that builds a training prompt's request from request id, token ids and seeds."""
    rollout, objective = config.rollout, config.objective
    needed = build_objective(objective.name, **objective.settings).needs_columns
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
    """Plays the configured environment. Sampling errors are raised; an environment error fails one trajectory."""

    config: Config
    _: KW_ONLY
    sample: Sample
    environments: EnvironmentPool
    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[dict[str, Any]]
    stop_token_ids: Sequence[int]
    routing: tuple[int, int] | None  # (MoE layers, experts per token) if the config wants routes
    journals: Journals | None = None  # turns of training prompts, kept until the bank has the group
    gateway: AgentGateway | None = None  # set for an agent

    def __post_init__(self) -> None:
        tokenizer, tools = self.tokenizer, self.tools
        self._render: Render | None = None
        if self.config.data.chat_template:
            self._render = lambda messages: render_chat(tokenizer, messages, tools)
        self._no_tools = None if self.gateway is None else tools_problem(partial(render_chat, tokenizer))
        self._training_request = training_requests(self.config, self.stop_token_ids)
        self._numbers = itertools.count()  # group numbers
        self._counts: Counter[str] = Counter()
        self._warned = False  # whether a rewritten history was reported

    async def play(self, prompt: Prompt, rewards: RewardPool) -> RolloutGroup:
        """Play a training prompt's group. `rewards` scores it if the environment gives no reward."""
        order = next(self._numbers)
        rollout = self.config.rollout
        seeds = np.random.SeedSequence([self.config.run.seed, prompt.position]).generate_state(rollout.group_size)
        request = self._training_request(request_id=f"group-{prompt.position}", token_ids=prompt.token_ids, seeds=seeds)
        turns = [FinishedTurns() for _ in request.seeds]
        if self.journals is not None:
            turns = await self.journals.turns(prompt.position, request.n, rollout.temperature)
        trajectories = await self._play_all(prompt, request, rewards, turns, order, recorded=True)
        return self._group(prompt, request, trajectories)

    async def play_request(self, prompt: Prompt, request: GenerateRequest, rewards: RewardPool) -> list[Trajectory]:
        """Play `request.n` trajectories that are not trained on; `request` describes their first turn."""
        turns = [FinishedTurns() for _ in request.seeds]
        return await self._play_all(prompt, request, rewards, turns, next(self._numbers), recorded=False)

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
        first_requests = [
            replace(request, request_id=f"{name}.{i}", n=1, seeds=(s,), affinity=(name, f"{name}.{i}"))
            for i, s in enumerate(request.seeds)
        ]
        specs = [
            TrajectoryRequest(prompt, first_request, rewards, finished_turns, order, recorded)
            for first_request, finished_turns in zip(first_requests, turns, strict=True)
        ]
        return await results_of([asyncio.create_task(self._trajectory(spec)) for spec in specs])

    def take_metrics(self) -> dict[str, float]:
        """Return the trajectory metrics since the last call."""
        num_trajectories = max(self._counts["trajectories"], 1)
        count_names = ("turns", "calls", "call_errors") if self.tools or self.gateway else ("turns",)
        metrics = {f"environment/{name}_mean": self._counts[name] / num_trajectories for name in count_names}
        metrics["environment/max_turns_share"] = self._counts["max_turns"] / num_trajectories
        metrics["environment/rewritten_histories"] = float(self._counts["rewritten"])
        metrics["environment/replayed_turns"] = float(self._counts["replayed"])
        self._counts.clear()
        return metrics | self.environments.take_metrics()

    async def _trajectory(self, spec: TrajectoryRequest) -> Trajectory:
        """Play a trajectory. After an environment failure it has the turns so far and no reward.

        If the environment process died, a new process repeats the seed and the turns so far, once.
        """
        trajectory, failure = await self._attempt(spec)
        if failure is not None and failure.reason == "died":
            log.warning("environment of prompt row %d died (%s): it is replayed", spec.prompt.row, failure)
            spec.turns.rewind()
            trajectory, failure = await self._attempt(spec)
        if failure is not None:
            self.environments.count(spec.prompt, failure)
        return trajectory

    async def _attempt(self, spec: TrajectoryRequest) -> tuple[Trajectory, EnvironmentFailed | None]:
        attempt, failed = Attempt(), None
        longest = self.config.environment.trajectory_timeout_s
        async with self.environments.session(spec.order) as session:
            try:
                async with time_limit(longest) as clock:
                    await (self._alternate if self.gateway is None else self._converse)(spec, session, attempt)
                    if attempt.reward is None:
                        attempt.reward = await self._reward_of_text(spec, attempt.branches)
            except EnvironmentFailed as failure:
                attempt.reward, failed = None, failure
            except TimeoutError:
                if not clock.expired():
                    raise
                attempt.reward = None
                failed = EnvironmentFailed("timeout", f"longer than environment.trajectory_timeout_s = {longest} s")
        if spec.recorded:
            self._counts.update(trajectories=1, max_turns=attempt.finish_reason == "max_turns")
            if (dialogue := attempt.dialogue) is not None:
                self._counts.update(turns=dialogue.turns, calls=dialogue.calls, call_errors=dialogue.call_errors)
        rewards = attempt.turn_rewards
        has_turn_rewards = self.config.objective.credit == "turn" or any(value is not None for value in rewards)
        turn_rewards = [value or 0.0 for value in rewards] if has_turn_rewards else []
        return Trajectory(attempt.branches, attempt.finish_reason, attempt.reward, turn_rewards), failed

    async def _converse(self, spec: TrajectoryRequest, session: Session, attempt: Attempt) -> None:
        """Answer an agent's requests until the agent returns."""
        assert self.gateway is not None
        fatal_error: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def sample(context_ids: np.ndarray, max_tokens: int | None) -> Rollout:
            try:
                turn, token_limit = self._admit(spec, conversation, context_ids)
                return await self._turn(spec, turn, context_ids, min(token_limit, max_tokens or token_limit))
            except RequestRejected:
                raise
            except Exception as error:  # an engine or disk error ends the run, not only this request
                if not fatal_error.done():
                    fatal_error.set_exception(error)
                raise RequestRejected("the run cannot continue; its log has the reason") from None

        render = partial(render_chat, self.tokenizer)
        conversation = attempt.dialogue = Conversation(self.tokenizer, render, sample, self._no_tools)
        async with self.gateway.session(conversation) as key:
            agent = asyncio.ensure_future(session.run_agent(spec.prompt, self.gateway.url, key))
            try:
                await asyncio.wait((agent, fatal_error), return_when=asyncio.FIRST_COMPLETED)
            finally:
                agent.cancel()
        if fatal_error.done():
            fatal_error.result()
        attempt.reward = agent.result()
        attempt.finish_reason = conversation.finish_reason
        if spec.turns.left:
            raise EnvironmentFailed(
                "replay", "the agent does not repeat the requests from before a process died; make it deterministic"
            )
        if not conversation.branches:
            raise EnvironmentFailed("raised", "the agent returned before the policy took a turn")

    def _admit(self, spec: TrajectoryRequest, conversation: Conversation, context_ids: np.ndarray) -> tuple[int, int]:
        """Count the next turn; return (turn number, token limit). Raises `RequestRejected`.

        It never waits, so parallel requests cannot exceed the limits together.
        """
        longest, turn = self.config.data.max_prompt_tokens, conversation.admitted
        if turn >= self.config.environment.max_turns:
            conversation.finish_reason = "max_turns"
            raise RequestRejected(f"environment.max_turns = {turn}: this trajectory has used them")
        opening = len(context_ids) if conversation.opening is None else conversation.opening
        if opening > longest:
            raise RequestRejected(f"context_length_exceeded: prompt of {opening}, data.max_prompt_tokens = {longest}")
        token_limit = self._left(spec, opening, context_ids)
        if token_limit < 1:
            conversation.finish_reason = "length"
            raise RequestRejected(
                f"context_length_exceeded: {len(context_ids) - opening} tokens after the prompt, "
                f"rollout.max_response_tokens = {spec.first.max_tokens}"
            )
        conversation.admitted, conversation.opening = turn + 1, opening
        return turn, token_limit

    def _left(self, spec: TrajectoryRequest, opening: int, context_ids: np.ndarray) -> int:
        """Return how many tokens a turn may have, below 1 if none. `opening`: tokens before the first turn."""
        token_limit = spec.first.max_tokens - max(len(context_ids) - opening, 0)  # a later prompt may be shorter
        return min(token_limit, self.config.environment.max_turn_tokens or token_limit)

    async def _alternate(self, spec: TrajectoryRequest, session: Session, attempt: Attempt) -> None:
        """Take turns with an environment."""
        dialogue = attempt.dialogue = await self._begin(spec, session)
        attempt.finish_reason = await self._play(spec, session, dialogue, attempt.turn_rewards)
        is_finished, rewards = attempt.finish_reason == "stop", attempt.turn_rewards
        if self.config.objective.credit == "turn" and is_finished and all(value is None for value in rewards):
            raise EnvironmentNameError(
                f"objective.credit = turn: {self.config.environment.described} gave no turn of prompt "
                f"{spec.prompt.position} a reward; let `step` return 0.0 for a turn that earned nothing, or set "
                "credit to trajectory"
            )
        attempt.reward = await session.finish()

    async def _begin(self, spec: TrajectoryRequest, session: Session) -> Dialogue:
        prompt, data = spec.prompt, self.config.data
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
        self, spec: TrajectoryRequest, session: Session, dialogue: Dialogue, turn_rewards: list[float | None]
    ) -> str:
        """Take turns until the trajectory is over; return the finish reason."""
        for turn in range(self.config.environment.max_turns):
            context_ids = dialogue.token_ids
            opened = opened_reasoning(dialogue.branches[-1][-1].text)
            token_limit = self._left(spec, len(opening_tokens(dialogue.branches[0])), context_ids)
            if token_limit < 1:
                return "length"
            sampled = await self._turn(spec, turn, context_ids, token_limit)
            dialogue.add_turn(sampled)
            turn_rewards.append(None)
            if sampled.finish_reason == "length":
                return "length"
            step = await session.step(readable(self.tokenizer, sampled.token_ids), opened)
            turn_rewards[-1] = step.reward
            results = [message["content"] for message in step.messages if message["role"] == "tool"]
            dialogue.calls += len(results)
            dialogue.call_errors += sum(result.startswith(CALL_ERROR) for result in results)
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

    async def _turn(self, spec: TrajectoryRequest, turn: int, context_ids: np.ndarray, token_limit: int) -> Rollout:
        """Return a turn that was finished before, or sample a new turn and return it once it is on disk."""
        if (finished_turn := spec.turns.take(context_ids)) is not None:
            self._counts["replayed"] += 1
            return finished_turn
        if spec.turns.left and self.gateway is None:
            raise EnvironmentFailed(
                "replay",
                f"turn {turn}: it does not repeat its answers from before its process died; use its seed",
            )
        first = spec.first

        def request(attempt: int) -> GenerateRequest:
            seed = np.random.SeedSequence([*first.seeds, turn, attempt]).generate_state(1, np.uint64)[0]
            name, seeds = f"{first.request_id}.{turn}-{attempt}", (int(seed) >> 1,)
            return replace(first, request_id=name, token_ids=context_ids, seeds=seeds, max_tokens=token_limit)

        (sampled,) = await self.sample(request, f"prompt {spec.prompt.position}, turn {turn}")
        await spec.turns.add(context_ids, sampled)
        return sampled

    async def _reward_of_text(self, spec: TrajectoryRequest, branches: list[list[Piece]]) -> float | None:
        """Score the last turn with `reward:` of the config; return None if the verifier failed."""
        last = max((p for branch in branches for p in branch if p.sampled is not None), key=lambda p: p.turn)
        text = str(self.tokenizer.decode(last.token_ids, skip_special_tokens=True))
        (reward,), (failed,) = await spec.rewards.score(spec.prompt, [text], recorded=spec.recorded)
        return None if failed else float(reward)

    def _group(self, prompt: Prompt, request: GenerateRequest, trajectories: Sequence[Trajectory]) -> RolloutGroup:
        """Build the group; the prompt is the common beginning of all branches.

        Without sampled tokens, the prompt stays as it is. Example: [5, 7, 2] and [5, 7, 9] give [5, 7].
        """
        branches = [branch for trajectory in trajectories for branch in trajectory.branches]
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
        for number, trajectory in enumerate(trajectories):
            rows = [as_rollout(branch, len(token_ids), "stop", number) for branch in trajectory.branches]
            rows = rows or [self._nothing(request, len(token_ids), number, like)]
            rows[-1] = replace(rows[-1], finish_reason=trajectory.finish_reason)
            rollouts += rows
            owners += [trajectory] * len(rows)
        turn_rewards = None
        if any(trajectory.turn_rewards for trajectory in trajectories):
            turn_rewards = tuple(np.array(trajectory.turn_rewards, np.float32) for trajectory in trajectories)
        return RolloutGroup(
            prompt,
            tuple(rollouts),
            np.array([owner.reward or 0.0 for owner in owners], np.float32),
            np.array([owner.reward is None for owner in owners]),
            self.config.rollout.temperature,
            turn_rewards,
        )

    def _nothing(self, request: GenerateRequest, prompt_tokens: int, number: int, like: Mapping[str, Any]) -> Rollout:
        """Return the rollout of a trajectory without turns; dtypes and trailing shapes come from `like`, if present."""
        sizes = zip("KLk", (request.topk, *(self.routing or ())), strict=False)
        shapes = expected_shapes({}, 0, prompt_tokens - 1, like, **dict(sizes))
        columns = {
            c.name: np.zeros(np.maximum(shapes[c.name], 0), getattr(like.get(c.name), "dtype", c.dtypes[0]))
            for c in COLUMNS
            if request.asks_for(c)
        }
        if self.routing is not None:
            columns["routed_experts"][:] = absent_experts(prompt_tokens, *self.routing)
        return Rollout.from_columns(columns, token_ids=np.zeros(0, np.int32), finish_reason="abort", trajectory=number)
