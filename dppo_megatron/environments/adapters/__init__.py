"""Environments of other packages, as they are published: each module has the class that `environment.name` names, or
the agent that `environment.agent` does.

The packages are imported when an environment is made, in its own process.
"""

from __future__ import annotations

from dppo_megatron.types import Prompt


def seed_of(prompt: Prompt, seed: int) -> int:
    """The row's column `seed`, so that a file can fix its tasks, as for an evaluation; else that of the group."""
    return int(prompt.columns.get("seed", seed))
