"""Defines `ModelError`, which `dppo_megatron.hf` raises."""

from __future__ import annotations

from collections.abc import Sequence

from dppo_megatron.errors import ExpectedError, listing


class ModelError(ExpectedError, ValueError):
    """Raised for a model directory or tensors that cannot be used. Each message line names a problem."""

    def __init__(self, source: str, problems: Sequence[str]):
        self.source = source
        self.problems = tuple(problems)
        super().__init__(listing(source, self.problems))
