"""The one error of checkpoints."""

from __future__ import annotations

from dppo_megatron.errors import ExpectedError


class CheckpointError(ExpectedError, RuntimeError):
    """A checkpoint that could not be written, or that does not fit this run, with every reason."""
