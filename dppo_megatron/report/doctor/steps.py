"""Defines the data that checks read: a training step, and numbers kept from earlier steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np

from dppo_megatron.bank import BankEntry
from dppo_megatron.data.tokenizer_file import TokenizerFile
from dppo_megatron.types import RolloutGroup

FIRST, RECENT = 3, 10  # steps that count as the start, and as recent


@dataclass(frozen=True)
class ExaminedStep:
    """Contains the data that checks read from a step.

    `read_group(entry, samples, parts)` returns a group. `setting("a.b", *kinds)` returns a run setting, or None.
    """

    number: int
    metrics: Mapping[str, float | None]
    entries: Sequence[BankEntry]
    read_group: Callable[[BankEntry, Sequence[int], Sequence[str]], RolloutGroup]
    setting: Callable[..., Any]
    tokenizer: TokenizerFile | None  # None: model.path has no tokenizer.json

    def value(self, name: str) -> float | None:
        metric = self.metrics.get(name)
        return float(metric) if isinstance(metric, int | float) else None

    @cached_property
    def rewards(self) -> np.ndarray:
        """Return the rewards, fp32 [trajectories with a reward]."""
        pairs = [(entry, entry.first_of_trajectories) for entry in self.entries]
        parts = [entry.rewards[first][~entry.reward_failed[first]] for entry, first in pairs]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    @cached_property
    def rewards_of_truncated(self) -> np.ndarray:
        """Return the rewards of samples with `rollout.max_response_tokens` tokens, fp32; empty without the setting."""
        limit = self.setting("rollout.max_response_tokens", int)
        parts = [e.rewards[(e.response_lengths == limit) & ~e.reward_failed] for e in self.entries if limit]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    @cached_property
    def newest_version(self) -> int | None:
        return max((entry.max_version for entry in self.entries), default=None)


@dataclass
class Past:
    """Stores a few numbers of earlier steps and groups. Adding a step takes constant time."""

    _first: dict[str, list[float]] = field(default_factory=dict)  # metric -> values at the first steps with the metric
    _recent: dict[str, deque[float]] = field(default_factory=dict)
    steps: int = 0
    reward_means: list[float] = field(default_factory=list)  # of each step with rewards
    lowest_reward: float = np.inf
    highest_reward: float = -np.inf
    newest_versions: list[int] = field(default_factory=list)

    def add(self, step: ExaminedStep) -> None:
        self.steps += 1
        for name in step.metrics:
            if (value := step.value(name)) is not None:
                if len(first := self._first.setdefault(name, [])) < FIRST:
                    first.append(value)
                self._recent.setdefault(name, deque(maxlen=RECENT)).append(value)
        rewards, mean = step.rewards, step.value("rollout/reward_mean")
        if not len(rewards) and mean is not None:
            rewards = np.array([mean])
        if len(rewards):
            self.reward_means.append(float(rewards.mean()))
            self.lowest_reward = min(self.lowest_reward, float(rewards.min()))
            self.highest_reward = max(self.highest_reward, float(rewards.max()))
        if step.newest_version is not None:
            self.newest_versions.append(step.newest_version)

    def last(self, name: str) -> float | None:
        """Return the metric's last value, or None."""
        return self._recent[name][-1] if name in self._recent else None

    def recent(self, name: str) -> float | None:
        """Return the median of the metric's newest values, at most RECENT, or None."""
        return _median(self._recent.get(name, ()))

    def at_start(self, name: str) -> float | None:
        """Return the median of the metric's first values, at most FIRST, or None."""
        return _median(self._first.get(name, ()))

    def first(self, name: str) -> list[float]:
        """Return the metric's first values, at most FIRST."""
        return self._first.get(name, [])

    def improved(self, step: ExaminedStep) -> bool:
        """Return whether the mean reward exceeds the first steps' mean by a tenth of the reward range.

        A supervised run has no rewards, and counts as improved.
        """
        now = step.value("rollout/reward_mean")
        if now is None or not self.reward_means:
            return now is None and not self.reward_means
        span = self.highest_reward - self.lowest_reward
        return now > float(np.mean(self.reward_means[:FIRST])) + 0.1 * span


def _median(values: Collection[float]) -> float | None:
    return median(values) if values else None
