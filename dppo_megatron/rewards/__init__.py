"""Verifiers: what a response is worth, run so that no verifier can stop or stall the run."""

from .interface import Reward
from .pool import RewardPool
from .registry import RewardError, build_reward

__all__ = ["Reward", "RewardError", "RewardPool", "build_reward"]
