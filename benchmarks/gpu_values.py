"""Checks of gpu_day.py's parts, and the problems that a part found.

With --no-values the parts compare no numbers. On a device that computes nothing (a null CUDA driver) every number is
garbage, but mixed devices, wrong signatures and waits of the host still show.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

VARIABLE = "GPU_DAY_NO_VALUES"


def values_checked() -> bool:
    return os.environ.get(VARIABLE) != "1"


def require(holds: bool, what: str) -> None:
    """End the part with the message `what` if the condition does not hold."""
    if not holds:
        sys.exit(f"WRONG: {what}")


def require_value(holds: bool, what: str) -> None:
    """Do the same for a computed value; with --no-values it is not checked."""
    require(holds or not values_checked(), what)


class Problems:
    """Problems of a part. The part continues after each, so that one run on a GPU shows all; `end` ends the part."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, what: str) -> None:
        self._found.append(what)
        print(f"  WRONG: {what}", flush=True)

    def value(self, holds: bool, what: str) -> None:
        if not holds and values_checked():
            self.add(what)

    @contextlib.contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """Note an error inside this context as a problem."""
        try:
            yield
        except Exception as error:
            self.add(f"{what}: {type(error).__name__}: {error}")

    def end(self) -> None:
        if self._found:
            sys.exit(f"{len(self._found)} WRONG, the first: {self._found[0]}")
