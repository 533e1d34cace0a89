"""Where the time of a step goes and how stale its tokens are, from lengths of responses: a simulation of the run.

It follows the orchestrator's own rules for when a group may be begun and stored (`orchestrator.staleness`), the engines
as a number of groups that are sampled at once, and the orchestrator as one worker through which all bytes go.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

import numpy as np

from dppo_megatron.orchestrator.staleness import StalenessBound

REPEATS = 8  # draws of the lengths; the prediction is their mean


@dataclass(frozen=True, slots=True)
class PaceSettings:
    """Of a run. Seconds of the trainer are those of one step, however long its responses."""

    prompts_per_step: int
    concurrent: int  # groups
    max_staleness: int
    steps: int
    tokens_per_s: float  # that an engine samples of one response, with as many beside it as there will be
    bytes_per_token: float  # of a response, in a reply and in the bank
    store_bytes_per_s: float  # that the orchestrator takes in, scores and stores
    train_s: float
    read_s: float = 0.0
    publish_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Means over the steps of a run and over several draws; seconds of one step."""

    wait_s: float  # for rollouts
    read_s: float
    train_s: float
    publish_s: float
    staleness: float  # policy versions, over all sampled tokens

    @property
    def step_s(self) -> float:
        return self.wait_s + self.read_s + self.train_s + self.publish_s


def predict(groups: Sequence[np.ndarray], settings: PaceSettings, seed: int = 0) -> Pace:
    """groups: lengths of the samples of some groups; each draw takes as many as a run needs from them, with
    replacement, or all of them in their order where there are just so many."""
    wanted = settings.steps * settings.prompts_per_step
    rng = np.random.default_rng(seed)
    draws = [[groups[i] for i in rng.integers(0, len(groups), wanted)] for _ in range(REPEATS)]
    if len(groups) == wanted:
        draws = [list(groups)]
    runs = [_Run(draw, settings).play() for draw in draws]
    return Pace(
        mean(wait for wait, _ in runs),
        settings.read_s,
        settings.train_s,
        settings.publish_s,
        mean(staleness for _, staleness in runs),
    )


@dataclass(slots=True)
class _Run:
    groups: list[np.ndarray]
    settings: PaceSettings
    now: float = 0.0
    events: list[tuple[float, int, int]] = field(default_factory=list)  # when, what, of which group
    published: list[float] = field(default_factory=lambda: [0.0])  # when, by version
    begun: dict[int, float] = field(default_factory=dict)  # when, of the groups that run
    last_steps: dict[int, int] = field(default_factory=dict)
    finished: list[tuple[int, int, float]] = field(default_factory=list)  # last step, group, when it was begun
    stored: int = 0
    busy_until: float = 0.0  # the orchestrator
    waiting_since: float | None = 0.0  # the trainer
    waited: float = 0.0
    lag: float = 0.0  # over all tokens stored

    def play(self) -> tuple[float, float]:
        """Seconds of a step in which the trainer waited, and the mean staleness."""
        s = self.settings
        bound = StalenessBound(s.prompts_per_step, s.max_staleness)
        self._begin(bound)
        while self.events:
            self.now, what, group = heapq.heappop(self.events)
            match what:
                case 0:  # sampled
                    size = float(self.groups[group].sum()) * s.bytes_per_token
                    self.busy_until = max(self.busy_until, self.now) + size / s.store_bytes_per_s
                    heapq.heappush(self.events, (self.busy_until, 1, group))
                case 1:  # scored
                    self.finished.append((self.last_steps.pop(group), group, self.begun.pop(group)))
                    self._store(bound)
                    self._train()
                case 2:  # published
                    self.published.append(self.now)
                    self.waiting_since = self.now
                    self._train()
            self._begin(bound)
        tokens = sum(int(lengths.sum()) for lengths in self.groups)
        return self.waited / s.steps, self.lag / tokens

    def _begin(self, bound: StalenessBound) -> None:
        version = len(self.published) - 1
        while len(self.begun) < self.settings.concurrent:
            group = self.stored + len(self.begun) + len(self.finished)
            if group >= len(self.groups) or version < bound.needed_version(group):
                return
            self.begun[group] = self.now
            self.last_steps[group] = bound.last_step(version)
            sampled = self.now + float(self.groups[group].max()) / self.settings.tokens_per_s
            heapq.heappush(self.events, (sampled, 0, group))

    def _store(self, bound: StalenessBound) -> None:
        self.finished.sort()
        while self.finished:
            others = [last for last, _, _ in self.finished[1:]]
            if self.last_steps and not bound.leaves_room(self.stored, [*self.last_steps.values(), *others]):
                return
            _, group, begun = self.finished.pop(0)
            self.lag += self._lag_of(self.groups[group], begun, self.stored // self.settings.prompts_per_step)
            self.stored += 1

    def _lag_of(self, lengths: np.ndarray, begun: float, step: int) -> float:
        """In all tokens of a group that goes on under the weights that come meanwhile."""
        newer = 0.0
        for published in self.published[1:]:
            newer += np.clip(lengths - max(published - begun, 0.0) * self.settings.tokens_per_s, 0, None).sum()
        return step * float(lengths.sum()) - newer

    def _train(self) -> None:
        s, step = self.settings, len(self.published) - 1
        if self.waiting_since is None or step >= s.steps or self.stored < (step + 1) * s.prompts_per_step:
            return
        self.waited += self.now - self.waiting_since
        self.waiting_since = None
        heapq.heappush(self.events, (self.now + s.read_s + s.train_s + s.publish_s, 2, 0))
