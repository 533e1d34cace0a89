"""Represent a step's trajectories as arrays [G, n] of rewards, lengths and advantages, without tokens.

A plain response is a trajectory with one branch. Each branch is a row in the batch. A trajectory counts once in the
group baseline and in the denominators, with the tokens in all branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dppo_megatron.bank import BankEntry
from dppo_megatron.config import Config
from dppo_megatron.objectives import (
    group_advantages,
    keep_finished,
    sequence_weights,
    soft_overlong_penalty,
    turn_advantages,
)


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Describes G groups of n trajectories; every array except the last is [G, n].

    Example: 1 group of 2 trajectories, the second truncated: rewards [[1, 0]], valid [[True, True]], sampled [[3, 8]],
    truncated [[False, True]], carrying [[3, 0]] with `objective.overlong_filter`.
    """

    rewards: np.ndarray  # fp32, from the verifier
    valid: np.ndarray  # bool, False if the verifier gave no reward
    lengths: np.ndarray  # int32, tokens after the prompt in the longest branch
    sampled: np.ndarray  # int32, tokens that the policy sampled, in all branches
    branches: np.ndarray  # int32, number of branches
    truncated: np.ndarray  # bool, cut at the length limit
    carrying: np.ndarray  # int32, tokens that carry loss: all sampled tokens, or 0
    penalties: np.ndarray  # fp32, added to the rewards: at most 0
    advantages: np.ndarray  # fp32 [G, n, T], per turn; T = 1: a single value for all tokens

    @classmethod
    def from_entries(cls, entries: Sequence[BankEntry], config: Config) -> StepSamples:
        """Build the arrays from the index lines only.

        A truncated response that `objective.overlong_filter` removes from the loss still counts in the group baseline,
        so the group's mean reward does not depend on which responses carry loss.
        """
        first = [e.first_of_trajectories for e in entries]
        last = [np.append(starts[1:], e.num_samples) - 1 for starts, e in zip(first, entries, strict=True)]

        def over_branches(combine: np.ufunc, values: Callable[[BankEntry], np.ndarray]) -> np.ndarray:
            return np.stack([combine.reduceat(values(e), starts) for starts, e in zip(first, entries, strict=True)])

        rewards = np.stack([e.rewards[starts] for starts, e in zip(first, entries, strict=True)])
        lengths = over_branches(np.maximum, lambda e: e.response_lengths)
        sampled = over_branches(np.add, lambda e: e.sampled)
        branches = over_branches(np.add, lambda e: np.ones(e.num_samples, np.int32))
        valid = ~over_branches(np.logical_or, lambda e: e.reward_failed)
        truncated = np.stack([e.truncated[ends] for ends, e in zip(last, entries, strict=True)])
        loss_tokens = np.where(valid, sampled, 0)
        if config.objective.overlong_filter:
            loss_tokens = keep_finished(torch.from_numpy(truncated), torch.from_numpy(loss_tokens)).numpy()
        penalties = np.zeros_like(rewards)
        if buffer := config.reward.overlong_buffer:
            limit = config.rollout.max_response_tokens
            penalties = soft_overlong_penalty(torch.from_numpy(lengths), limit, buffer).numpy()
        advantages = _advantages(entries, rewards + penalties, valid, config)
        return cls(rewards, valid, lengths, sampled, branches, truncated, loss_tokens, penalties, advantages)

    def part(self, groups: np.ndarray) -> StepSamples:
        """Return only the given groups, with advantages from the whole step."""
        return StepSamples(*(getattr(self, name)[groups] for name in self.__slots__))

    def loss_weights(self, config: Config) -> np.ndarray:
        """Return the loss weight of the tokens in each trajectory, fp32 [G, n].

        The denominators count all loss-carrying trajectories in these groups, even with advantage 0.
        """
        loss_tokens = torch.from_numpy(self.carrying).flatten()
        weights = sequence_weights(config.objective.aggregation, loss_tokens, horizon=config.horizon)
        return weights.view(self.carrying.shape).numpy()

    def metrics(self, config: Config) -> dict[str, float]:
        metrics = {
            "rollout/reward_mean": float(self.rewards[self.valid].mean()) if self.valid.any() else 0.0,
            "rollout/response_tokens_mean": float(self.sampled.mean()),
            "rollout/response_tokens_max": float(self.sampled.max()),
            "rollout/truncated_share": float(self.truncated.mean()),
            "rollout/groups_without_signal": float((self.advantages == 0).all(axis=(1, 2)).sum()),
            "rollout/reward_failed": float((~self.valid).sum()),
        }
        if (self.branches > 1).any():
            metrics["rollout/branches_mean"] = float(self.branches.mean())
        if config.objective.overlong_filter:
            metrics["rollout/overlong_filtered"] = float((self.truncated & self.valid).sum())
        if config.reward.overlong_buffer:
            metrics["rollout/overlong_penalty_mean"] = float(self.penalties.mean())
        return metrics


def _advantages(entries: Sequence[BankEntry], rewards: np.ndarray, valid: np.ndarray, config: Config) -> np.ndarray:
    """Return the advantages, fp32 [G, n, T]; rewards and valid are [G, n]."""
    settings = config.objective
    rewards_and_valid = torch.from_numpy(rewards), torch.from_numpy(valid)
    if settings.credit == "trajectory":
        return group_advantages(*rewards_and_valid, kind=settings.advantage).numpy()[:, :, None]
    turn_rewards: list[Sequence[Sequence[float] | np.ndarray]] = [
        e.turn_rewards or [[]] * rewards.shape[1] for e in entries
    ]
    turns = np.array([[len(trajectory) for trajectory in group] for group in turn_rewards])
    padded = np.zeros((*rewards.shape, max(turns.max(), 1)), np.float32)
    padded[np.arange(padded.shape[2]) < turns[:, :, None]] = np.concatenate(
        [trajectory for group in turn_rewards for trajectory in group]
    )
    return turn_advantages(
        rewards_and_valid[0],
        torch.from_numpy(padded),
        torch.from_numpy(turns),
        rewards_and_valid[1],
        settings.advantage,
        settings.discount,
    ).numpy()
