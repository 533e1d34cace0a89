"""What the orchestrator measured of each step, appended to a JSONL file that the trainer forwards to the trackers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from dppo_megatron.common.files import append_json_line
from dppo_megatron.types import RolloutGroup


class StepRecorder:
    """Collects what generation cost per training step and writes one record when the step's last group is in."""

    def __init__(
        self,
        path: Path,
        groups_per_step: int,
        take_metrics: Callable[[], Mapping[str, float]],
        *,
        alone: bool = False,
    ):
        """`take_metrics`: those of the `Sampler` and of the rewards. `alone`: no trainer makes these the records of the
        run's steps, so they are."""
        self._path = path
        self._alone = alone
        self._rewards: dict[int, list[float]] = {}
        self._groups_per_step = groups_per_step
        self._take_metrics = take_metrics
        self._started: dict[int, float] = {}
        self._finished: dict[int, int] = {}
        self._response_tokens: dict[int, int] = {}
        self._dropped = self._given_up = 0

    def count_started(self, step: int) -> None:
        self._started.setdefault(step, time.monotonic())

    def count_given_up(self) -> None:
        """Counts one group that took longer than the staleness bound allows."""
        self._given_up += 1

    def count_dropped(self, step: int, group: RolloutGroup) -> None:
        """Counts one group that was sampled for the step and is not trained on."""
        self._dropped += 1
        self._count_tokens(step, group)

    def count_finished(self, step: int, group: RolloutGroup) -> None:
        """Counts one group of the step; steps that an earlier orchestrator began are not timed."""
        self._finished[step] = self._finished.get(step, 0) + 1
        self._count_tokens(step, group)
        self._rewards.setdefault(step, []).extend(group.rewards[~group.reward_failed].tolist())
        if self._finished[step] < self._groups_per_step or step not in self._started:
            return
        seconds = time.monotonic() - self._started.pop(step)
        tokens = self._response_tokens.pop(step)
        ended = self._groups_per_step + self._dropped + self._given_up
        del self._finished[step]
        rewards = self._rewards.pop(step)
        own = {"time": time.time(), "time/step_s": seconds, "rollout/reward_mean": float(np.mean(rewards or [0.0]))}
        append_json_line(
            self._path,
            {
                "step": step + 1,
                "time/generate_s": seconds,
                "rollout/generated_tokens_per_s": tokens / max(seconds, 1e-9),
                "rollout/dropped_groups": self._dropped,
                "rollout/too_stale_groups": self._given_up,
                "rollout/too_stale_share": self._given_up / ended,
                **self._take_metrics(),
                **(own if self._alone else {}),
            },
        )
        self._dropped = self._given_up = 0

    def _count_tokens(self, step: int, group: RolloutGroup) -> None:
        tokens = sum(len(r.versions) for r in group.rollouts)
        self._response_tokens[step] = self._response_tokens.get(step, 0) + tokens
