"""Trajectories of very different lengths: the real orchestrator, episodes and bank, an engine by a table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dppo_megatron.bank.journal import Journals
from dppo_megatron.common.worker import WorkerError
from dppo_megatron.config.task import EnvironmentConfig
from dppo_megatron.rollout.engines.protocol import GenerateRequest
from dppo_megatron.rollout.environments.episodes import Episodes
from dppo_megatron.rollout.environments.interface import EnvironmentFailed, StepResult
from dppo_megatron.rollout.environments.pool import EnvironmentPool
from dppo_megatron.rollout.fleet.sampling import Sampler
from dppo_megatron.run.launch.evaluate import with_settings
from dppo_megatron.types import Prompt, Rollout
from dppo_megatron.weights.published import PublishedPolicy
from tests.support.audit import audit
from tests.support.fakes.orchestrator import STOP, ScriptedEngine, Tokenizer, World, sampling_config

GROUPS, SAMPLES, STEPS = 4, 3, 6
GOES_ON, ENDS, SAID = 1, 2, 3
Length = tuple[int, int, float]  # turns, tokens of each, seconds of each


def heavy_tailed(position: int, number: int) -> Length:
    """Pareto: most trajectories take a few milliseconds, a few take a hundred times as long."""
    rng = np.random.default_rng([position, number])
    turns, tokens = (min(1 + int(rng.pareto(1.1)), most) for most in (9, 30))
    return turns, 1 + tokens, min(5e-4 * (1 + rng.pareto(1.0)), 0.06)


@dataclass
class TableEngine(ScriptedEngine):
    """Answers a turn after the seconds, and with as many tokens, as the table has for its trajectory."""

    table: Callable[[int, int], Length] = heavy_tailed
    asked: list[tuple[int, int, int]] = field(default_factory=list)  # policy, position, turn
    cancelled: dict[int, float] = field(default_factory=dict)  # position -> when

    def __post_init__(self):
        self.delay = lambda request: self.table(*turn_of(request)[:2])[2]

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        position, _, turn = turn_of(request)
        self.asked.append((PublishedPolicy.read(self.published).version, position, turn))
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            self.cancelled[position] = time.time()
            raise

    def answer(self, request: GenerateRequest, version: int) -> tuple[Rollout, ...]:
        position, number, turn = turn_of(request)
        turns, tokens, _ = self.table(position, number)
        ids = np.full(tokens, STOP, np.int32)
        ids[0] = ENDS if turn + 1 == turns else GOES_ON
        return (Rollout(ids, np.full(tokens, -1.0, np.float32), np.full(tokens, version, np.int32), "stop"),)


def turn_of(request: GenerateRequest) -> tuple[int, ...]:
    """Position, number of the sample, and turn."""
    return tuple(map(int, request.request_id.removeprefix("group-").split("-")[0].split(".")))


class Codec(Tokenizer):
    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        return " ".join(str(int(i)) for i in ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [SAID]


@dataclass
class TableWorkers:
    """Replaces the processes of environments; it dies once at the reset of each position in `dies`."""

    dies: set[int] = field(default_factory=set)
    begun: list[int] = field(default_factory=list)  # positions, in the order of their resets
    held: int = 0
    most_held: int = 0
    fresh: bool = True
    turns: int = 0

    def in_thread(self, call: Callable[[], Any]) -> Future:
        done: Future = Future()
        try:
            done.set_result(call())
        except (EnvironmentFailed, WorkerError) as error:
            done.set_exception(error)
        return done

    def lease(self) -> TableWorkers:
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        return self

    def give_back(self, worker: TableWorkers, *, usable: bool) -> None:
        self.held -= 1

    def reset(self, prompt: Prompt, seed: int) -> None:
        self.begun.append(prompt.position)
        if prompt.position in self.dies:
            self.dies.remove(prompt.position)
            raise WorkerError("its process ended")

    def step(self, text: str, opened: str = "") -> StepResult:
        return StepResult([{"role": "user", "content": "go on"}], 1.0, text.split()[0] == str(ENDS))

    def finish(self) -> float:
        return 1.0

    def close(self) -> None:
        pass


class Played(World):
    """A world of trajectories in turns."""

    def __init__(
        self,
        directory: Path,
        *,
        workers: int,
        table=heavy_tailed,
        dies=(),
        training_s=0.0,
        longest=None,
        **rollout: Any,
    ):
        config = sampling_config(
            directory / "run",
            steps=STEPS,
            **{"prompts_per_step": GROUPS, "group_size": SAMPLES, "max_response_tokens": 400, **rollout},
        )
        environment = EnvironmentConfig(
            name="tests:Table", workers=workers, max_turns=100, trajectory_timeout_s=longest
        )
        super().__init__(with_settings(config, environment=environment, data={"eval": None}))
        self.training_s = training_s
        self.played, self.workers = TableEngine(self.run.published, table=table), TableWorkers(set(dies))
        self.episodes = self._episodes

    def _episodes(self, sampler: Sampler) -> Episodes:
        environments = EnvironmentPool(self.config.environment)
        environments._pool = self.workers
        self.journals = Journals(self.run.open_turns, ())
        self.made = Episodes(
            self.config, sample=sampler.sample, environments=environments, tokenizer=Codec(), tools=[],
            stop_token_ids=(STOP,), routing=None, journals=self.journals,
        )  # fmt: skip
        return self.made

    def play(self) -> None:
        self.run_attempt(self.played)
        self.journals.close()
        assert self.played.running == self.workers.held == 0
        assert list(self.run.open_turns.iterdir()) == []

    def lengths(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(position, number in the group) -> (turns, sampled tokens) of all that the bank has."""
        return {
            (group.prompt.position, number): (
                1 if rollout.spans is None else int(rollout.spans[-1, 2]) + 1,
                len(rollout.versions),
            )
            for group in self.groups()
            for number, rollout in enumerate(group.rollouts)
        }

    def lags(self) -> list[int]:
        return [i // GROUPS - min(int(r.versions.min()) for r in g.rollouts) for i, g in enumerate(self.groups())]


def of_table(positions, table=heavy_tailed) -> dict[tuple[int, int], tuple[int, int]]:
    drawn = {(p, i): table(p, i) for p in positions for i in range(SAMPLES)}
    return {of: (turns, turns * tokens) for of, (turns, tokens, _) in drawn.items()}


@pytest.fixture
def played(tmp_path):
    return partial(Played, tmp_path)


@pytest.mark.parametrize("staleness", [0, 4])
def test_trained_groups_have_the_same_lengths_as_sampled_groups(played, staleness):
    """Every prompt once and no other, each as long as the table has it: so the distributions are the same."""
    w = played(workers=12, max_staleness=staleness)
    w.play()
    assert w.lengths() == of_table(range(STEPS * GROUPS))
    turns = [turns for turns, _ in w.lengths().values()]
    assert max(turns) > 4 * np.median(turns)
    begun = [position for _, position, turn in w.played.asked if turn == 0]
    assert len(begun) == STEPS * GROUPS * SAMPLES, "none is sampled twice"
    assert max(w.lags()) <= staleness
    assert w.dropped() == []
    found = audit(w.groups())
    assert found.problems == []


def test_groups_take_seats_in_the_order_in_which_they_begin(played):
    """Many more groups than places. After the death of its environment a group continues before later ones."""
    w = played(workers=2, max_staleness=4, dies={0, 5})
    w.play()
    assert w.workers.begun == sorted(w.workers.begun)
    assert w.workers.begun.count(0) == w.workers.begun.count(5) == SAMPLES + 1
    assert w.workers.most_held == w.played.most_running == 2
    assert w.lengths() == of_table(range(STEPS * GROUPS))


def one_hangs(position: int, number: int) -> Length:
    turns, tokens, seconds = heavy_tailed(position, number)
    return turns, tokens, 30.0 if (position, number) == (1, 0) else min(seconds, 0.004)


def test_dropped_groups_are_counted_and_bounded_and_leave_nothing_behind(played, caplog):
    """The worst case drops all running groups but those of one step: here half of them."""
    w = played(workers=12, table=one_hangs, max_staleness=1, beyond_bound="drop", training_s=0.03)
    w.play()
    trained, dropped = {g.prompt.position for g in w.groups()}, [r["position"] for r in w.dropped()]
    begun = {position for _, position, _ in w.played.asked}
    assert 1 in dropped
    assert {r["reason"] for r in w.dropped()} == {"too_stale"}
    assert sorted([*trained, *dropped]) == sorted(begun)
    assert w.lengths() == of_table(trained)
    assert max(w.lags()) <= 1
    records = w.records()
    assert sum(r["rollout/too_stale_groups"] for r in records) == len(dropped) <= len(begun) / 2
    assert all(r["rollout/too_stale_share"] * (GROUPS + r["rollout/too_stale_groups"]) == pytest.approx(
        r["rollout/too_stale_groups"]) for r in records)  # fmt: skip
    (given_up,) = [record.created for record in caplog.records if record.message.startswith("prompt 1: given up")]
    assert w.played.cancelled[1] - given_up < 1


@pytest.mark.slow
def test_a_trajectory_has_a_time_for_all_of_it(played):
    """A trajectory that takes longer fails and asks the engine no more; the others of its group count."""
    w = played(workers=12, table=one_hangs, longest=2.0)
    w.play()
    failed = {g.prompt.position: g.reward_failed.tolist() for g in w.groups() if g.reward_failed.any()}
    assert failed == {1: [True, False, False]}
    assert w.made.take_metrics()["environment/failed_timeout"] == 1
    assert len(w.groups()) == STEPS * GROUPS
