"""Evaluate the policy on sets of held-out prompts, with the engines that serve it."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo_megatron.common.files import append_json_line
from dppo_megatron.common.progress import show_progress
from dppo_megatron.common.tasks import results_of
from dppo_megatron.config import Config
from dppo_megatron.config.task import HELDOUT, EvalSet
from dppo_megatron.report.heldout import describe
from dppo_megatron.report.tail import evaluated
from dppo_megatron.rollout.engines.protocol import GenerateRequest
from dppo_megatron.rollout.environments.episodes import Episodes
from dppo_megatron.rollout.fleet.sampling import Sampler
from dppo_megatron.rollout.rewards import RewardPool
from dppo_megatron.types import Prompt

from .answers import SavedAnswers
from .eval_scores import average, ks, majority, pass_at

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Contains an evaluation set with prompts and graders."""

    settings: EvalSet
    prompts: Sequence[Prompt]
    rewards: RewardPool
    episodes: Episodes | None = None  # plays answers in turns


@dataclass(eq=False)
class Evaluator:
    """Answers and scores every set at the versions that are due: first, last, and every `eval.every`.

    Results are appended to the rollout metrics, one record per set. The record's step is the oldest policy version of
    any token in the answers: the due version, unless all tokens come from newer versions. A version that already has a
    result is not evaluated again. A resumed evaluation uses the stored answers if they come from the same policy.
    Seeds are derived from run seed, set, prompt and sample.
    """

    config: Config
    _: KW_ONLY
    sets: Mapping[str, Evaluated]
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    output: Path  # record file
    answers: Path  # directory with one entry per set

    def __post_init__(self) -> None:
        self._started = evaluated(self.output)
        self._gate = asyncio.Semaphore(self.config.rollout.max_concurrent_groups)  # shared by all evaluations

    def due(self, version: int) -> bool:
        every = self.config.eval.every
        at_ends = version in (0, self.config.train.steps)
        return bool(self._missing(version)) and (at_ends or (every > 0 and version % every == 0))

    def start(self, version: int, policy: Any, sampler: Sampler) -> asyncio.Task[dict[str, dict[str, float]]]:
        """Start a task that returns the metrics of every set. A failed verifier counts as 0.

        Afterwards `version` is no longer due. `policy` is JSON that distinguishes policies with the same version.
        Raises the errors of `Sampler.sample`.
        """
        missing = self._missing(version)
        self._started |= {(version, name) for name in missing}
        # The tasks exist from here on, so their requests precede the requests of groups that begin later.
        running = {name: self._start_set(name, version, policy, sampler) for name in missing}
        return asyncio.create_task(_gather(running))

    def _missing(self, version: int) -> list[str]:
        return [name for name in self.sets if (version, name) not in self._started]

    def _start_set(self, name: str, version: int, policy: Any, sampler: Sampler) -> asyncio.Task[dict[str, float]]:
        eval_set = self.sets[name]
        settings = eval_set.settings.model_dump(mode="json")
        identity = {
            "set": name,
            "settings": settings,
            "seed": self.config.run.seed,
            "stop_token_ids": list(self.stop_token_ids),
            "prompts": zlib.crc32(
                b"".join(p.token_ids.tobytes() + p.answer.encode() + b"\0" for p in eval_set.prompts)
            ),
            "policy": policy,
        }
        if eval_set.episodes is not None:
            identity["environment"] = self.config.environment.model_dump(mode="json")
        answers = SavedAnswers(
            self.answers / name, version, identity, prompts=len(eval_set.prompts), n=eval_set.settings.n
        )
        if answers.records:
            log.info("%s: %d of %d prompts were answered before", name, len(answers.records), len(eval_set.prompts))
        running = [
            asyncio.create_task(self._answer(name, version, prompt, sampler, answers))
            for prompt in eval_set.prompts
            if prompt.position not in answers.records
        ]
        return asyncio.create_task(self._record(name, answers, running))

    async def _record(self, name: str, answers: SavedAnswers, running: list[asyncio.Task[None]]) -> dict[str, float]:
        started = time.monotonic()
        await results_of(running)
        seconds = time.monotonic() - started
        records = [answers.records[position] for position in sorted(answers.records)]
        oldest = min(sample["versions"][0] for record in records for sample in record["samples"])
        metrics = scores(name, self.sets[name].settings, records, seconds)
        answers.finish({"step": oldest, **metrics})
        append_json_line(self.output, {"step": oldest, **metrics})
        self._started.add((oldest, name))
        log.info("policy %d: %s", oldest, describe(name, metrics))
        return metrics

    async def _answer(self, name: str, version: int, prompt: Prompt, sampler: Sampler, answers: SavedAnswers) -> None:
        eval_set = self.sets[name]
        async with self._gate:
            samples = await (self._sampled if eval_set.episodes is None else self._play)(name, version, prompt, sampler)
        answers.add(
            {
                "position": prompt.position,
                "row": prompt.row,
                "prompt": prompt.text,
                "answer": prompt.answer,
                "samples": samples,
            }
        )
        show_progress(self.output)

    async def _sampled(self, name: str, version: int, prompt: Prompt, sampler: Sampler) -> list[dict[str, Any]]:
        eval_set = self.sets[name]
        rollouts = await sampler.sample(
            self._requests(name, version, prompt), f"held-out prompt {prompt.position} of {name}"
        )
        texts = self.tokenizer.batch_decode([r.token_ids.tolist() for r in rollouts], skip_special_tokens=True)
        rewards, failed = await eval_set.rewards.score(prompt, texts, recorded=False)
        finals = await eval_set.rewards.final_answers(prompt, texts) if len(texts) > 1 else None
        samples = [
            {
                "text": text,
                "reward": float(reward) * (not sample_failed),
                "failed": bool(sample_failed),
                "tokens": len(rollout.token_ids),
                "finish": rollout.finish_reason,
                "versions": [int(rollout.versions.min()), int(rollout.versions.max())],
            }
            for text, reward, sample_failed, rollout in zip(texts, rewards, failed, rollouts, strict=True)
        ]
        for sample, final in zip(samples, finals or (), strict=bool(finals)):
            sample["final"] = final
        return samples

    async def _play(self, name: str, version: int, prompt: Prompt, _: Sampler) -> list[dict[str, Any]]:
        """Return the samples for answers in turns. The text is the last branch, prompt included."""
        eval_set, request = self.sets[name], self._requests(name, version, prompt)(0)
        assert eval_set.episodes is not None
        samples = []
        for trajectory in await eval_set.episodes.play_request(prompt, request, eval_set.rewards):
            versions = [int(v) for rollout in trajectory.sampled for v in rollout.versions] or [version]
            samples.append(
                {
                    "text": "".join(piece.text for branch in trajectory.branches[-1:] for piece in branch),
                    "reward": trajectory.reward or 0.0,
                    "failed": trajectory.reward is None,
                    "tokens": sum(len(rollout.token_ids) for rollout in trajectory.sampled),
                    "finish": trajectory.finish_reason,
                    "versions": [min(versions), max(versions)],
                }
            )
        return samples

    def _requests(self, name: str, version: int, prompt: Prompt) -> Callable[[int], GenerateRequest]:
        settings, seed = self.sets[name].settings, self.config.run.seed
        longest = settings.max_response_tokens
        assert longest is not None  # `Config.eval_sets` fills in the default

        def request(attempt: int) -> GenerateRequest:
            words = np.random.SeedSequence([seed, zlib.crc32(name.encode()), prompt.position, attempt])
            seeds = [int(s) >> 1 for s in words.generate_state(settings.n)]
            prefix = f"eval-{version}" if name == HELDOUT else f"eval-{version}-{name}"
            return GenerateRequest(
                request_id=f"{prefix}-{prompt.position}-{attempt}",
                token_ids=prompt.token_ids,
                n=settings.n,
                seeds=tuple(seeds) if settings.temperature else (seed,),
                temperature=settings.temperature,
                max_tokens=longest,
                stop_token_ids=self.stop_token_ids,
                topk=0,
                top_p=settings.top_p,
            )

        return request


async def _gather(running: Mapping[str, asyncio.Task[dict[str, float]]]) -> dict[str, dict[str, float]]:
    return dict(zip(running, await results_of(running.values()), strict=True))


def scores(name: str, eval_set: EvalSet, records: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float]:
    """Compute a set's metrics from only the answers and the seconds: see `report.names`."""
    samples = [record["samples"] for record in records]
    flat = [sample for answers in samples for sample in answers]
    rewards = np.array([[sample["reward"] for sample in answers] for answers in samples])
    spread = max(s["versions"][1] for s in flat) - min(s["versions"][0] for s in flat)
    length = float(np.mean([sample["tokens"] for sample in flat]))
    failed = np.array([[sample["failed"] for sample in answers] for answers in samples])
    right = ~failed & (rewards >= eval_set.pass_reward - 1e-6)  # rewards are sums in fp32
    if name == HELDOUT:
        return {
            "eval/accuracy": float(right.mean()),
            "eval/reward_mean": float(rewards.mean()),
            "eval/response_tokens_mean": length,
            "eval/prompts": len(records),
            "eval/version_spread": spread,
            "time/eval_s": seconds,
        }
    mean, error = average(right)
    metrics: dict[str, float] = {f"avg@{eval_set.n}": mean}
    if error is not None:
        metrics[f"avg@{eval_set.n}_stderr"] = error
    metrics |= {f"pass@{k}": pass_at(k, right) for k in ks(eval_set.n)}
    if any("final" in sample for sample in flat):
        finals = [[sample.get("final") for sample in answers] for answers in samples]
        metrics[f"maj@{eval_set.n}"] = majority(right, finals)
    metrics |= {
        "reward_mean": float(rewards.mean()),
        "failed_share": float(failed.mean()),
        "response_tokens_mean": length,
        "truncated_share": float(np.mean([sample["finish"] == "length" for sample in flat])),
        "prompts": len(records),
        "version_spread": spread,
        "seconds": seconds,
    }
    return {f"eval/{name}/{metric}": value for metric, value in metrics.items()}
