"""Whether gpu_day.py's parts compare numbers, and the problems that a part found.

With --no-values they do not: on a device that computes nothing (a null CUDA driver) every number is garbage, while
device mixing, signatures and waits of the host still show.
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
    """Ends the part."""
    if not holds:
        sys.exit(f"WRONG: {what}")


def require_value(holds: bool, what: str) -> None:
    """The same for what was computed."""
    require(holds or not values_checked(), what)


class Problems:
    """A part goes on after a problem, so that one run on a GPU shows all of them; `end` ends it."""

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
        """An error inside is a problem."""
        try:
            yield
        except Exception as error:
            self.add(f"{what}: {type(error).__name__}: {error}")

    def end(self) -> None:
        if self._found:
            sys.exit(f"{len(self._found)} WRONG, the first: {self._found[0]}")
