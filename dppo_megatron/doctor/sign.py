"""What a sign is: a function that finds evidence in a step, with a name and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .steps import Past, Step

Evidence = str | None  # None: this step does not show it


class Sign(NamedTuple):
    name: str
    look: Callable[[Step, Past], Evidence]
    remedy: str


def sign(name: str, remedy: str) -> Callable[[Callable[[Step, Past], Evidence]], Sign]:
    return lambda look: Sign(name, look, remedy)
