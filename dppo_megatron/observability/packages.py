"""Packages that only some runs need."""

from __future__ import annotations

from dppo_megatron.errors import ExpectedError


class MissingPackageError(ExpectedError, ImportError):
    """A setting needs a package that is not installed; the message names the extra that brings it."""
