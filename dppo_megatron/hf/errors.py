"""The error of this package."""

from __future__ import annotations

from collections.abc import Sequence

from dppo_megatron.errors import ExpectedError, listing


class ModelError(ExpectedError, ValueError):
    """A model directory or a set of tensors that cannot be used, with every problem on a line."""

    def __init__(self, source: str, problems: Sequence[str]):
        self.source = source
        self.problems = tuple(problems)
        super().__init__(listing(source, self.problems))
