"""Sample dynamically (DAPO, arXiv 2503.14476) by replacing groups without a signal before training on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dppo_megatron.config.engine import RolloutConfig
from dppo_megatron.errors import ExpectedError
from dppo_megatron.objectives import group_has_signal
from dppo_megatron.types import RolloutGroup

NO_SIGNAL = "no_signal"  # the reason in the bank
FEWEST_FAILED = 8  # fewer groups may be a short failure of a service


class NoSignal(ExpectedError, RuntimeError):
    """Nearly every prompt gives a group with equal rewards."""


class NoReward(ExpectedError, RuntimeError):
    """Every reward failed, in as many consecutive groups as a step has."""


@dataclass(eq=False)
class SignalFilter:
    """Chooses the groups to keep: all groups, or with `rollout.dynamic_sampling` the groups with different rewards.

    Rewards are the verifier's, and failed rewards are ignored. A step may spend at most
    `rollout.max_prompts_per_group` prompts per group, on average, counted from the process start.

    last_failure: returns why the last reward failed, for `NoReward`.
    trajectory_failure: returns the most frequent reason why recent trajectories failed in the environment or agent.
    Both return an empty text without failures.
    """

    config: RolloutConfig
    last_failure: Callable[[], str]
    trajectory_failure: Callable[[], str] = str

    def __post_init__(self) -> None:
        self._failed = 0  # consecutive groups in which every reward failed
        self._dropped: Counter[int] = Counter()

    def keeps(self, group: RolloutGroup, step: int) -> bool:
        """Return whether `step` trains on `group`.

        Raises NoSignal if it rejected too many groups. Raises NoReward if every reward failed in as many consecutive
        groups as a step has, at least `FEWEST_FAILED`.
        """
        config = self.config
        self._failed = self._failed + 1 if group.reward_failed.all() else 0
        if self._failed >= max(config.prompts_per_step, FEWEST_FAILED):
            subject, cause, remedy = "the last one", self.last_failure(), "correct the reward"
            if frequent_failure := self.trajectory_failure():
                subject, cause = "most trajectories", frequent_failure
                remedy = "correct the environment or agent (a higher limit needs a new run)"
            raise NoReward(
                f"step {step}: every reward of the last {self._failed} groups failed, {subject} with {cause}; "
                f"{remedy}, then --resume"
            )
        if not config.dynamic_sampling or _has_signal(group):
            return True
        self._dropped[step] += 1
        if self._dropped[step] > (config.max_prompts_per_group - 1) * config.prompts_per_step:
            raise NoSignal(
                f"step {step}: {self._dropped[step]} prompts gave groups of {config.group_size} equal rewards, which "
                f"leaves fewer than one group in {config.max_prompts_per_group} prompts "
                f"(rollout.max_prompts_per_group = {config.max_prompts_per_group}); the task is too easy or too hard "
                "for this policy: raise the bound and continue with --resume, or start a run with other prompts, a "
                "larger rollout.group_size or without rollout.dynamic_sampling"
            )
        return False


def describe_drop(group: RolloutGroup) -> str:
    """Return the detail that the bank stores for a dropped prompt."""
    valid = group.rewards[~group.reward_failed]
    equal = f"rewards of {len(valid)} samples are all {valid[0]:g}" if len(valid) else "no reward"
    return f"{equal}, {int(group.reward_failed.sum())} failed"


def _has_signal(group: RolloutGroup) -> bool:
    rewards, failed = torch.from_numpy(group.rewards), torch.from_numpy(group.reward_failed)
    return bool(group_has_signal(rewards[None], valid=~failed[None]))
