"""Compute reinforcement-learning objectives on [T] in pure torch, without process groups or vocabulary dimension.

Axes and presets are data, and configs are checked against them, possibly without torch. Code on tensors, listed in
`on_tensors`, is therefore imported on first use.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .presets import PRESETS, Preset
from .settings import ADVANTAGE_KINDS, AGGREGATION_KINDS, AXES, ObjectiveError, ObjectiveSettings

__all__ = [
    "ADVANTAGE_KINDS",
    "AGGREGATION_KINDS",
    "AXES",
    "PRESETS",
    "ObjectiveError",
    "ObjectiveSettings",
    "Preset",
]

if TYPE_CHECKING:
    from .on_tensors import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        # `from . import inputs` looks here before it imports the submodule, possibly during the import of on_tensors.
        if name.startswith("_") or find_spec(f"{__name__}.{name}"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(".on_tensors", __name__), name)
