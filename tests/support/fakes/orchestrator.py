"""Runs an orchestrator in this process with a scripted engine, prompts, rewards and a trainer."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron.bank import BankReader, BankWriter, EarlierSamples
from dppo_megatron.bank.journal import Journals
from dppo_megatron.config import Config
from dppo_megatron.rollout.engines.protocol import GenerateRequest, InvalidSample
from dppo_megatron.rollout.environments.episodes import Episodes
from dppo_megatron.rollout.fleet.pool import FixedEngines
from dppo_megatron.rollout.fleet.registry import forget_all
from dppo_megatron.rollout.fleet.sampling import Sampler
from dppo_megatron.rollout.orchestrator.evaluation import Evaluated, Evaluator
from dppo_megatron.rollout.orchestrator.metrics import StepRecorder
from dppo_megatron.rollout.orchestrator.orchestrator import Orchestrator
from dppo_megatron.rollout.orchestrator.teachers import Teachers
from dppo_megatron.run.checks import settings_problems
from dppo_megatron.run_dir import RunDir
from dppo_megatron.types import Prompt, Rollout
from dppo_megatron.weights.published import PublishedFollower, PublishedPolicy
from tests.support.configs import make_config

STOP = 99


def sampling_config(run_dir: Path, *, steps: int = 3, sets: Any = (), **rollout: Any) -> Config:
    config = make_config(
        run={"dir": str(run_dir), "seed": 5, "stall_timeout_s": 5},
        data={"eval": "held_out.jsonl"},
        train={"steps": steps},
        eval={"every": 2, "sets": dict(sets)},
        rollout={"prompts_per_step": 4, "group_size": 3, "max_response_tokens": 8, **rollout},
    )
    assert not settings_problems(config)
    return config


class Prompts:
    """Provides the prompt [p] with row p % 7 at position p."""

    def __init__(self, count: int = 1000):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def prompt(self, position: int) -> Prompt:
        return Prompt(position, position % 7, np.array([position], np.int32), f"prompt {position}", "")


class Tokenizer:
    def batch_decode(self, sequences, skip_special_tokens: bool) -> list[str]:
        return [" ".join(str(int(token)) for token in tokens) for tokens in sequences]


class Rewards:
    """Gives sample i the reward i, or 1 if `hopeless(position)`. If `broken(position)`, every verifier fails."""

    last_failure = "raised: Broken"

    def __init__(self, hopeless: Callable[[int], bool], broken: Callable[[int], bool]):
        self._hopeless, self._broken = hopeless, broken

    async def score(self, prompt: Prompt, texts: list[str], *, recorded: bool = True) -> tuple[np.ndarray, np.ndarray]:
        equal = self._hopeless(prompt.position)
        rewards = np.array([1.0 if equal else i for i in range(len(texts))], np.float32)
        failed = np.full(len(texts), self._broken(prompt.position))
        return rewards * ~failed, failed

    async def final_answers(self, prompt: Prompt, texts: list[str]) -> list[str]:
        return [text.split()[0] for text in texts]


@dataclass
class ScriptedEngine:
    """Answers after `delay(request)` seconds with tokens that depend on the seeds and the served policy version."""

    published: Path
    delay: Callable[[GenerateRequest], float] = lambda request: 0.0
    corrupts: Callable[[GenerateRequest], bool] = lambda request: False
    fails: Callable[[GenerateRequest], Exception | None] = lambda request: None
    url: str = "in-process"
    requests: list[GenerateRequest] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)  # request id -> policy version
    running: int = 0
    most_running: int = 0

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        version = PublishedPolicy.read(self.published).version  # the trainer publishes what engines serve
        self.requests.append(request)
        self.versions[request.request_id] = version
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay(request))
            if error := self.fails(request):
                raise error
            if self.corrupts(request):
                raise InvalidSample(f"group {request.request_id}: a log-prob is not finite")
            return self.answer(request, version)
        finally:
            self.running -= 1

    def answer(self, request: GenerateRequest, version: int) -> tuple[Rollout, ...]:
        return tuple(self._sample(seed, version) for seed in request.seeds)

    def _sample(self, seed: int, version: int) -> Rollout:
        rng = np.random.default_rng([seed, version])
        size = int(rng.integers(1, 8))
        tokens = rng.integers(0, STOP, size + 1).astype(np.int32)
        tokens[-1] = STOP
        logprobs = -rng.exponential(size=size + 1).astype(np.float32)
        return Rollout(tokens, logprobs, np.full(size + 1, version, np.int32), "stop")


@dataclass
class World:
    """Represents a run directory in which orchestrators run, one attempt after the other."""

    config: Config
    hopeless: Callable[[int], bool] = lambda position: False
    broken: Callable[[int], bool] = lambda position: False
    training_s: float = 0.0  # from a step's last group to the next policy
    last_version: int | None = None  # the trainer dies after publishing it
    journals: Journals | None = None
    prompts_in_all: int | None = None  # without a trainer: number of prompts that one policy answers
    episodes: Callable[[Sampler], Episodes] | None = None  # if the policy answers in turns
    teachers: Callable[[], Teachers] | None = None  # if teachers score groups

    @property
    def run(self) -> RunDir:
        return RunDir(self.config.run.dir)

    def engine(self, **script: Any) -> ScriptedEngine:
        return ScriptedEngine(self.run.published, **script)

    def run_attempt(self, engine: ScriptedEngine, *, until_groups: int | None = None) -> None:
        """Run an orchestrator and a trainer; kill them once the bank has `until_groups`."""
        asyncio.run(self._run_attempt(engine, until_groups))

    async def _run_attempt(self, engine: ScriptedEngine, until_groups: int | None) -> None:
        config, run = self.config, self.run
        run.root.mkdir(parents=True, exist_ok=True)
        forget_all(run)
        rewards = Rewards(self.hopeless, self.broken)
        with BankWriter(run.bank, config.rollout.prompts_per_step, fsync=False) as bank:
            trainer = asyncio.create_task(self._train(bank))
            parts = {"tokenizer": Tokenizer(), "rewards": rewards, "stop_token_ids": (STOP,)}
            sampler = Sampler(FixedEngines([engine]))
            teachers = None if self.teachers is None else self.teachers()
            orchestrator = Orchestrator(
                config,
                sampler=sampler,
                prompts=Prompts(),
                bank=bank,
                published=PublishedFollower(run.published, config.run.stall_timeout_s),
                evaluator=Evaluator(
                    config,
                    sets={
                        name: Evaluated(one, [Prompts().prompt(i) for i in range(2)], rewards)
                        for name, one in config.eval_sets.items()
                    },
                    tokenizer=parts["tokenizer"],
                    stop_token_ids=(STOP,),
                    output=run.rollout_metrics,
                    answers=run.answers,
                ),
                recorder=StepRecorder(
                    run.rollout_metrics,
                    config.rollout.prompts_per_step,
                    sampler.take_metrics,
                    alone=self.prompts_in_all is not None,
                ),
                episodes=None if self.episodes is None else self.episodes(sampler),
                teachers=teachers,
                journals=self.journals,
                prompts_in_all=self.prompts_in_all,
                earlier=EarlierSamples(bank.reader()) if config.engine.draft_tokens else None,
                **parts,
            )
            attempt = asyncio.create_task(orchestrator.run())
            try:
                if until_groups is None:
                    await attempt
                while not attempt.done() and bank.num_train_groups < until_groups:
                    await asyncio.sleep(0.001)
            finally:
                for task in (attempt, trainer):
                    task.cancel()
                await asyncio.gather(attempt, trainer, return_exceptions=True)
                if teachers is not None:
                    await teachers.close()

    async def _train(self, bank: BankWriter) -> None:
        """Publish version v as soon as the bank has the batches of v steps."""
        last = self.config.train.steps if self.last_version is None else self.last_version
        last = last if self.prompts_in_all is None else 0
        for version in range(last + 1):
            while bank.num_train_groups < version * self.config.rollout.prompts_per_step:
                await asyncio.sleep(0.001)
            await asyncio.sleep(self.training_s if version else 0)
            PublishedPolicy(version, "unused", time.time()).write(self.run.published)

    def groups(self) -> list:
        """Return every group of the bank in training order."""
        reader = BankReader(self.run.bank)
        return [reader.read(entry) for entry in reader.entries(0, reader.refresh())]

    def steps(self) -> list[list[int]]:
        """Return the prompt positions of each step's batch, ascending."""
        positions = [group.prompt.position for group in self.groups()]
        size = self.config.rollout.prompts_per_step
        return [sorted(positions[i : i + size]) for i in range(0, len(positions), size)]

    def dropped(self) -> list[dict]:
        """Return the bank's records of prompts without a group."""
        lines = [line for path in sorted(self.run.bank.glob("*.jsonl")) for line in path.read_text().splitlines()]
        return [record for record in map(json.loads, lines) if record["kind"] == "dropped"]

    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.run.rollout_metrics.read_text().splitlines()]
