"""The one error of weight sync."""

from __future__ import annotations

from dppo_megatron.errors import ExpectedError


class WeightSyncError(ExpectedError, RuntimeError):
    """The engines do not serve the weights the trainer holds. Raised on every trainer rank."""
