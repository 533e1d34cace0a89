"""Adapt environments from other packages.

Each module has a class for `environment.name` or an agent for `environment.agent`. The packages are imported when an
environment is created, in the environment's process.
"""

from __future__ import annotations

from dppo_megatron.types import Prompt


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return the row's `seed` column, else the group's seed. A file can thus fix the tasks."""
    return int(prompt.columns.get("seed", seed))
