"""Plans a run before it starts: builds each kind of rank, estimates the memory, and suggests changes that fit.

Megatron-core has no memory estimate. Megatron-LM has one (megatron/training/theoretical_memory_usage.py), but it counts
neither latent attention nor our loss, publishing and engines. `tests/run/plan` compares our estimate with all
allocations of updates.
"""

from dppo_megatron.common.hardware import hardware

from .memory import Load, estimate
from .plan_text import report
from .planning import Advice, Cluster, LayoutPlan, advise, make_plan
from .ranks import RankBuilder

__all__ = [
    "Advice",
    "Cluster",
    "LayoutPlan",
    "Load",
    "RankBuilder",
    "advise",
    "estimate",
    "hardware",
    "make_plan",
    "report",
]
