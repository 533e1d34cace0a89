"""The error of this package: a model directory or a tensor set that must not be used, with every reason."""

from __future__ import annotations

from collections.abc import Sequence

from dppo_megatron.errors import ExpectedError, listing


class ModelError(ExpectedError, ValueError):
    """Every problem found with one model, one line each: what, and the remedy where there is one."""

    def __init__(self, source: str, problems: Sequence[str]):
        self.source = source
        self.problems = tuple(problems)
        super().__init__(listing(source, self.problems))
