"""The policy in Megatron-core: layout, model, update, log-probs, checkpoints.

`check_model` starts no process and needs none. `init_layout` comes first in a trainer
rank.
"""

import sys
import warnings

# Megatron-core warns at import of what is not installed (Actor.describe lists what is used instead), and calls torch by
# names that a newer torch renames; neither is for whoever reads the run's log.
warnings.filterwarnings("ignore", module=r"megatron\.core\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")

from . import without_cuda
from .engine_library import load_problem

# Megatron-core imports wandb for an inference server that is not used here: a quarter of the time to import it.
if _hides_wandb := "wandb" not in sys.modules:
    sys.modules["wandb"] = None
try:
    load_problem()
    without_cuda.import_without_compiled_fusions()
    import megatron.core  # noqa: F401
finally:
    if _hides_wandb:
        del sys.modules["wandb"]

from .actor import Actor, TrainingDiverged, UpdateStats
from .checkpoint.errors import CheckpointError
from .forward import apply_objective
from .layout import Layout, LayoutError, init_layout
from .model import check_model
from .reference import Reference
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
    "TrainingDiverged",
    "UpdateStats",
    "apply_objective",
    "check_model",
    "init_layout",
]
