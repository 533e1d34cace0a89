"""Implements the policy in Megatron-core: layout, model, update, log-probs, checkpoints.

`check_model` works in a single process and starts no other. A trainer rank calls `init_layout` first.
"""

from .megatron_import import import_megatron

import_megatron()

from .actor import Actor, TrainingDiverged, UpdateStats
from .checkpoint.directory import CheckpointError
from .forward import apply_objective
from .frozen import Reference, TrainerTeacher
from .layout import Layout, LayoutError, init_layout
from .model import check_model
from .scoring import Scores
from .step_line import StepLine

__all__ = [
    "Actor",
    "CheckpointError",
    "Layout",
    "LayoutError",
    "Reference",
    "Scores",
    "StepLine",
    "TrainerTeacher",
    "TrainingDiverged",
    "UpdateStats",
    "apply_objective",
    "check_model",
    "init_layout",
]
