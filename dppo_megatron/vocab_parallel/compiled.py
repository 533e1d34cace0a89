"""Applies torch.compile where it works, if the vocabulary is large enough to repay compiling."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_WORTHWHILE = 1 << 13  # columns


def worthwhile(columns: int) -> bool:
    """Return whether `columns` columns repay compiling, which takes seconds once; eager takes about 2 ns per element.

    Only the columns count: compiled and eager code round differently, and a row's bits must not depend on the number of
    rows.
    """
    return columns >= _WORTHWHILE


class CompiledOrEager:
    """Compiles a function on first use, with dynamic shapes, so once per dtype.

    After a failed compilation (no C++ compiler, no Inductor) calls return None and the caller takes the eager path.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = None
        self._failed = False

    @property
    def usable(self) -> bool:
        return not self._failed

    def __call__(self, *args: Tensor, returns: bool = True) -> Any:
        """Return the function's result (True with returns=False), or None if it cannot be compiled here."""
        try:
            if self._compiled is None:
                self._compiled = torch.compile(self._function, dynamic=True)
            result = self._compiled(*args)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # Dynamo and Inductor raise many types of errors, before any code has run
            self._failed = True
            warnings.warn(
                f"torch.compile of {self._function.__name__} failed, using eager: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return result if returns else True
