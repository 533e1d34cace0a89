"""Adapt environments of other packages: each module has a class for `environment.name` or an agent for
`environment.agent`.

The packages are imported when an environment is created, in its own process.
"""

from __future__ import annotations

from dppo_megatron.types import Prompt


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return the row's column `seed`, with which a file can fix its tasks, else the group's seed."""
    return int(prompt.columns.get("seed", seed))
