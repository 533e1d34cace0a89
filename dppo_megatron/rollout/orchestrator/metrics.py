"""Record the orchestrator's metrics per step, in a JSONL file that the trainer forwards to the trackers."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np

from dppo_megatron.common.files import append_json_line
from dppo_megatron.types import RolloutGroup


@dataclass(eq=False)
class StepRecorder:
    """Measures generation cost per training step. Writes a record when the step's last group is stored."""

    path: Path
    groups_per_step: int
    take_metrics: Callable[[], Mapping[str, float]]  # metrics of the `Sampler` and the rewards
    _: KW_ONLY
    alone: bool = False  # there is no trainer, so these records are the run's step records

    def __post_init__(self) -> None:
        self._rewards: defaultdict[int, list[float]] = defaultdict(list)
        self._started: dict[int, float] = {}
        self._finished: Counter[int] = Counter()
        self._response_tokens: Counter[int] = Counter()
        self._dropped = self._given_up = 0

    def count_started(self, step: int) -> None:
        self._started.setdefault(step, time.monotonic())

    def count_given_up(self) -> None:
        """Count a group that took longer than the staleness bound allows."""
        self._given_up += 1

    def count_dropped(self, step: int, group: RolloutGroup) -> None:
        """Count a group that was sampled for the step and is not used for training."""
        self._dropped += 1
        self._count_tokens(step, group)

    def count_finished(self, step: int, group: RolloutGroup) -> None:
        """Count a finished group of the step. Steps that an earlier orchestrator began are not timed."""
        self._finished[step] += 1
        self._count_tokens(step, group)
        self._rewards[step].extend(group.rewards[~group.reward_failed].tolist())
        if self._finished[step] < self.groups_per_step or step not in self._started:
            return
        seconds = time.monotonic() - self._started.pop(step)
        tokens = self._response_tokens.pop(step)
        num_groups = self.groups_per_step + self._dropped + self._given_up
        del self._finished[step]
        rewards = self._rewards.pop(step)
        step_metrics = {
            "time": time.time(),
            "time/step_s": seconds,
            "rollout/reward_mean": float(np.mean(rewards or [0.0])),
        }
        append_json_line(
            self.path,
            {
                "step": step + 1,
                "time/generate_s": seconds,
                "rollout/generated_tokens_per_s": tokens / max(seconds, 1e-9),
                "rollout/dropped_groups": self._dropped,
                "rollout/too_stale_groups": self._given_up,
                "rollout/too_stale_share": self._given_up / num_groups,
                **self.take_metrics(),
                **(step_metrics if self.alone else {}),
            },
        )
        self._dropped = self._given_up = 0

    def _count_tokens(self, step: int, group: RolloutGroup) -> None:
        self._response_tokens[step] += sum(len(rollout.versions) for rollout in group.rollouts)
