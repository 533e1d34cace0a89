"""The error of this package: a model directory or a tensor set that must not be used, with every reason."""

from __future__ import annotations

from collections.abc import Sequence

from dppo_megatron.errors import ExpectedError

_SHOWN = 40  # a wrong directory can produce thousands of lines; the count stays exact


class ModelError(ExpectedError, ValueError):
    """Every problem found with one model, one line each: what, and the remedy where there is one."""

    def __init__(self, source: str, problems: Sequence[str]):
        self.source = source
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"  - {problem}" for problem in self.problems[:_SHOWN]]
        if count > _SHOWN:
            lines.append(f"  ... and {count - _SHOWN} more")
        super().__init__("\n".join([f"{source}: {count} problem{'s' if count != 1 else ''}", *lines]))
