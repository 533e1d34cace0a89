"""What a run needs before it is started: the model of every kind of rank, its memory, and what to change.

By hand, because Megatron-LM's estimate (megatron/training/theoretical_memory_usage.py) is not part of megatron-core and
counts neither latent attention, the loss and the publishing of weights as they are here, nor engines; `tests/plan`
compares this one with every allocation of real updates.
"""

from dppo_megatron.common.hardware import Hardware, UnknownHardware, hardware

from .advice import Advice, advise
from .cluster import Cluster
from .memory import Item, Load, Memory, estimate, largest_load
from .planning import Plan, make_plan
from .ranks import RankBuilder, RankModel
from .report import report

__all__ = [
    "Advice",
    "Cluster",
    "Hardware",
    "Item",
    "Load",
    "Memory",
    "Plan",
    "RankBuilder",
    "RankModel",
    "UnknownHardware",
    "advise",
    "estimate",
    "hardware",
    "largest_load",
    "make_plan",
    "report",
]
