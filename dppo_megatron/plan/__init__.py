"""What a run needs before it is started: the model of every kind of rank, its memory, and what to change."""

from .advice import Advice, advise
from .hardware import Cluster, Hardware, UnknownHardware, hardware
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
