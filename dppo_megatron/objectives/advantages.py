"""Compute advantages from the rewards of G groups. A group has n samples for one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .settings import ADVANTAGE_KINDS, ObjectiveError, nearest

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


ROUNDING = 2.0**-16
"""Rewards in a group are equal if they differ by at most this share of the group's largest |reward|. A reward model
gives such rewards for equal answers, and dividing by their standard deviation would give advantages of 1.5."""


@dataclass(frozen=True)
class RewardMoments:
    """Contains count, sum and sum of squares of group-centered rewards, each 0-d fp64.

    Ranks add their moments before they normalize.
    """

    count: Tensor
    total: Tensor
    squares: Tensor

    def __add__(self, other: RewardMoments) -> RewardMoments:
        return RewardMoments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def std(self) -> Tensor:
        """Return the sample standard deviation (n - 1), 0 for fewer than two samples."""
        spread = self.squares - self.total.square() / self.count.clamp(min=1)
        return (spread.clamp(min=0.0) / (self.count - 1).clamp(min=1)).sqrt()


def group_advantages(
    rewards: Float[Tensor, "G n"],
    valid: Bool[Tensor, "G n"] | None = None,
    kind: str = "group_mean",
    moments: RewardMoments | None = None,
) -> Float[Tensor, "G n"]:
    """Return the advantage of every sample.

    group_mean        reward - group mean (DPPO; Dr. GRPO, arXiv 2503.20783).
    group_mean_std    group_mean / the group's sample standard deviation (GRPO, arXiv 2402.03300).
    leave_one_out     reward - mean of the other samples (RLOO, arXiv 2402.14740) = n / (n - 1) group_mean.
    batch_mean        reward - batch mean; `rewards` must be the whole batch (FlashREINFORCE).
    batch_normalised  group_mean / its sample standard deviation across the batch (REINFORCE++-baseline,
                      arXiv 2501.03262). If `rewards` is only a part, pass the whole batch's `moments`.

    rewards: fp32 or fp64.
    valid: False where a sample failed. A failed sample gets 0, and every statistic excludes it.
    If all valid rewards in a group are equal up to `ROUNDING`, or only one reward is valid, all samples get exactly 0,
    except with batch_mean. No denominator has an epsilon. Raises ObjectiveError for an unknown kind or rewards that are
    not [G, n].

    Example: the rewards [[1, 0, 0, 1]] give group_mean [[0.5, -0.5, -0.5, 0.5]]. If the last sample failed, they give
    [[0.67, -0.33, -0.33, 0]].
    """
    if kind not in ADVANTAGE_KINDS:
        raise ObjectiveError(f"unknown advantage {kind!r}: {nearest(kind, ADVANTAGE_KINDS)}")
    centred, valid, signal = _centred(rewards, valid)
    if kind == "batch_mean":
        whole, _, _ = _centred(rewards.reshape(1, -1), valid.reshape(1, -1))
        return whole.reshape(rewards.shape).to(rewards.dtype)
    count = valid.sum(dim=1, keepdim=True)
    if kind == "group_mean_std":
        std = (centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        centred = centred / torch.where(signal, std, torch.ones_like(std))
    elif kind == "leave_one_out":
        centred = centred * count / (count - 1).clamp(min=1)
    elif kind == "batch_normalised":
        std = (moments or reward_moments(rewards, valid)).std.to(centred.device)
        centred = centred / torch.where(std > 0, std, torch.ones_like(std))
    return centred.to(rewards.dtype)


def turn_advantages(
    rewards: Float[Tensor, "G n"],
    turn_rewards: Float[Tensor, "G n T"],
    turns: Int[Tensor, "G n"],
    valid: Bool[Tensor, "G n"] | None = None,
    kind: str = "group_mean",
    discount: float = 1.0,
) -> Float[Tensor, "G n T"]:
    """Return the advantage of every turn in every trajectory, 0 after the last turn.

        A_k = R_k - baseline of the group's R_k,   R_k = sum over l >= k of discount^(l - k) r_l

    R_k is the return from turn k on (GTPO, arXiv 2511.14846; MT-GRPO, arXiv 2505.11821, for two turns). `kind`, a kind
    over groups, compares R_k with the returns of the trajectories that reached turn k. If no other trajectory reached
    turn k, the turn takes the advantage of the trajectory's first turn.

    rewards: per trajectory. If the turn rewards do not add up to it, the last turn gets the difference. So with
        discount 1, R_0 is the trajectory's reward, and A_0 equals the advantage from `group_advantages`.
    turn_rewards: per turn.
    turns: number of turns. A trajectory with 0 turns, because no turn had a reward, has the first turn's advantage in
        all T.

    Returns are equal if they differ by at most `ROUNDING` times the group's largest sum of |turn reward|. Raises as
    `group_advantages` does, and for kinds over the batch.

    Example, with discount 1:

        rewards [[1, 0]], turn_rewards [[[0, 1], [0, 0]]], turns [[2, 2]]
        returns [[[1, 1], [0, 0]]], advantages [[[0.5, 0.5], [-0.5, -0.5]]]
    """
    if kind in ("batch_mean", "batch_normalised"):
        raise ObjectiveError(f"advantage {kind!r} compares over the batch, but turns compare in groups; use another")
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    longest = turn_rewards.shape[2]
    whole = turns == 0
    number = torch.arange(longest, device=turns.device)
    turn_mask = number < turns[:, :, None]
    earned = torch.where(turn_mask, turn_rewards.double(), 0.0)
    rest = rewards.double() - earned.sum(2)
    last = (turns - 1).clamp(min=0)[:, :, None]
    earned = earned.scatter_add(2, last, rest[:, :, None])
    returns = torch.zeros_like(earned)
    next_return = torch.zeros_like(rest)
    for k in reversed(range(longest)):
        next_return = returns[:, :, k] = earned[:, :, k] + discount * next_return
    valid_turns = (turn_mask | (whole[:, :, None] & (number == 0))) & valid[:, :, None]
    rounding = ROUNDING * torch.where(valid, earned.abs().sum(2), 0.0).amax(1, keepdim=True)
    out = torch.zeros_like(returns)
    for k in range(longest):
        counts = valid_turns[:, :, k]
        differ = _spread(returns[:, :, k], counts) > rounding
        out[:, :, k] = group_advantages(torch.where(differ, returns[:, :, k], 0.0), counts, kind)
    alone = valid_turns & (valid_turns.sum(1, keepdim=True) == 1)
    as_whole = alone | (whole & valid)[:, :, None]
    return torch.where(as_whole, out[:, :, :1], out).to(rewards.dtype)


def reward_moments(rewards: Float[Tensor, "G n"], valid: Bool[Tensor, "G n"] | None = None) -> RewardMoments:
    """Return the moments of group-centered rewards, for kind 'batch_normalised' over several ranks."""
    centred, valid, _ = _centred(rewards, valid)
    return RewardMoments(valid.sum().double(), centred.sum(), centred.square().sum())


def group_has_signal(rewards: Float[Tensor, "G n"], valid: Bool[Tensor, "G n"] | None = None) -> Bool[Tensor, " G"]:
    """Return True for groups with at least two different valid rewards, which dynamic sampling keeps (DAPO)."""
    return _centred(rewards, valid)[2].squeeze(1)


def _centred(rewards: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Center rewards on the group mean. Returns three tensors:

    centred   [G, n] reward - group mean in fp64, 0 where invalid or without signal
    valid     [G, n] bool
    signal    [G, 1] whether the group has different valid rewards
    """
    if rewards.ndim != 2:
        raise ObjectiveError(f"rewards must be [G, n], got shape {tuple(rewards.shape)}")
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    if valid.shape != rewards.shape:
        raise ObjectiveError(f"valid has shape {tuple(valid.shape)}, rewards has {tuple(rewards.shape)}")
    values = torch.where(valid, rewards.double(), 0.0)
    # A comparison with a rounded mean would leave 1e-17 for equal rewards of 0.1, and a std would amplify it.
    signal = _spread(values, valid) > ROUNDING * values.abs().amax(dim=1, keepdim=True)
    mean = values.sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(valid & signal, values - mean, 0.0), valid, signal


def _spread(values: Tensor, valid: Tensor) -> Float[Tensor, "G 1"]:
    """Return the largest minus the smallest valid value in each group."""
    largest = torch.where(valid, values, -torch.inf).amax(dim=1, keepdim=True)
    return largest - torch.where(valid, values, torch.inf).amin(dim=1, keepdim=True)
