"""When torch.compile is used: on vocabularies large enough to repay it, and only where it works."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_WORTHWHILE = 1 << 13  # columns


def worthwhile(columns: int) -> bool:
    """Whether rows of so many columns repay compiling: seconds once, against some 2 ns per element in eager.

    By the columns alone: the two round differently, and a row's bits may not depend on how many stand beside it.
    """
    return columns >= _WORTHWHILE


class CompiledOrEager:
    """A function compiled on first use, with dynamic shapes so that there is one compilation per dtype.

    The only state is the compiled function, or the knowledge that compiling failed (no C++ compiler, no
    Inductor), in which case calls return None and the caller takes its eager path.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = None
        self._failed = False

    @property
    def usable(self) -> bool:
        return not self._failed

    def __call__(self, *args: Tensor, returns: bool = True) -> Any:
        """The function's result (True with returns=False), or None if it cannot be compiled here."""
        try:
            if self._compiled is None:
                self._compiled = torch.compile(self._function, dynamic=True)
            result = self._compiled(*args)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # Dynamo and Inductor raise many types; nothing has run when they do
            self._failed = True
            warnings.warn(
                f"torch.compile of {self._function.__name__} failed, using eager: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return result if returns else True
