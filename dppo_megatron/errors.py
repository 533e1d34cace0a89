"""Errors that a user can act on, and the one place that keeps their messages to a screen."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

LONGEST_MESSAGE = 4000  # bytes: a screen
_LONGEST_VALUE = 400
_SHORTEST_SHARE = 240  # bytes that each of many problems may take at least

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120
_repr.maxlong = 48
_repr.maxlevel = 3


class ExpectedError(Exception):
    """What went wrong is said in full by the message: what, where, and the remedy. Shown without a traceback."""

    def __str__(self) -> str:
        return bounded(super().__str__())


class MissingPackageError(ExpectedError, ImportError):
    """A setting needs a package that is not installed; the message names the extra that brings it."""


def shown(value: Any) -> str:
    """A value as it would be written; of a long one the beginning and end."""
    try:
        return bounded(_repr.repr(value), _LONGEST_VALUE)
    except ValueError:  # an integer of more digits than Python writes
        return f"<{type(value).__name__}>"


def bounded(text: str, most: int = LONGEST_MESSAGE) -> str:
    """`text` in at most `most` bytes, without what a terminal would obey or an encoding refuse."""
    size = len(text)
    text = "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text[:most])
    encoded = text.encode()
    if len(encoded) <= most and size <= most:
        return text
    end = f" ... ({size} characters)"
    return encoded[: most - len(end)].decode(errors="ignore") + end


def listing(source: str, problems: Sequence[str]) -> str:
    """SOURCE: N problems, then a line for each, or for as many as a screen holds and the number of the others."""
    count = len(problems)
    lines = [f"{bounded(source, 300)}: {count} problem{'s' if count != 1 else ''}"]
    left = LONGEST_MESSAGE - len(lines[0].encode()) - len(f"\n  ... and {count} more")
    share = max(_SHORTEST_SHARE, left // max(count, 1) - len("\n  - "))
    for shown_before, problem in enumerate(problems):
        line = f"  - {bounded(problem, share)}"
        left -= len(line.encode()) + 1
        if left < 0:
            lines.append(f"  ... and {count - shown_before} more")
            break
        lines.append(line)
    return "\n".join(lines)


def _escaped(character: str) -> str:
    return character if character == "\t" else character.encode("unicode_escape").decode()
