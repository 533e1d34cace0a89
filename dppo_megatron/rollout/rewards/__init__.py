"""Score responses with verifiers that cannot stop or stall the run."""

from .interface import NOT_APPLICABLE, GroupReward, Reward, Ungradable
from .pool import RewardPool
from .registry import RewardError, build_rewards, reward_range
from .workers import import_problem

__all__ = [
    "NOT_APPLICABLE",
    "GroupReward",
    "Reward",
    "RewardError",
    "RewardPool",
    "Ungradable",
    "build_rewards",
    "import_problem",
    "reward_range",
]
