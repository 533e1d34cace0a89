"""What a run needs before it is started: the model of every kind of rank, its memory, and what to change."""

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
