"""Define errors that a user can act on, and limit the length of their messages to one screen."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST_MESSAGE = 4000  # bytes, about one screen
_LONGEST_VALUE = 400
_SHORTEST_SHARE = 240  # bytes that each of many problems gets at least

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120
_repr.maxlong = 48
_repr.maxlevel = 3


class ExpectedError(Exception):
    """The message states the problem, its place and the remedy. It is shown without a traceback."""

    def __str__(self) -> str:
        return bounded(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep message and attributes in a pickle. A constructor may take other arguments than the message."""
        return _unpickled, (type(self), self.args), vars(self)


class MissingPackageError(ExpectedError, ImportError):
    """A setting needs a package that is not installed; the message names the extra that installs it."""


def _unpickled(kind: type[ExpectedError], args: tuple[Any, ...]) -> ExpectedError:
    assert kind.__base__ is not None
    error = kind.__base__.__new__(kind, *args)  # of the base with its memory layout, e.g. OSError
    error.args = args
    return error


def shown(value: Any) -> str:
    """Return a value as Python source; a long value is shortened to its beginning and end."""
    try:
        return bounded(_repr.repr(value), _LONGEST_VALUE)
    except ValueError:  # an integer of more digits than Python writes
        return f"<{type(value).__name__}>"


def bounded(text: str, most: int = LONGEST_MESSAGE) -> str:
    """Return `text` in at most `most` bytes; control characters and unencodable ones are escaped."""
    size = len(text)
    text = "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text[:most])
    encoded = text.encode()
    if len(encoded) <= most and size <= most:
        return text
    end = f" ... ({size} characters)"
    return encoded[: most - len(end)].decode(errors="ignore") + end


def listing(source: str, problems: Sequence[str]) -> str:
    """Return "SOURCE: N problems" and a line for each; if they do not fit on a screen, the number of the others."""
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


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return "did you mean 'a' or 'b'?" for known names with all words of `name` or similar ones, else `otherwise`.

    Example: dppo_tv has all its words in dppo_topk_tv, gsm8 is similar to gsm8k, and response_mask has the word mask.
    """
    folded = {other.lower(): other for other in known}
    close = [other for other in folded.values() if set(name.split("_")) <= set(other.split("_"))] if name else []
    close = close or [
        folded[other] for other in difflib.get_close_matches(name.lower(), sorted(folded), n=3, cutoff=0.65)
    ]
    close = close or [other for other in folded.values() if set(other.split("_")) <= set(name.split("_"))]
    return f"did you mean {' or '.join(map(repr, close))}?" if close else otherwise


def _escaped(character: str) -> str:
    return character if character == "\t" else character.encode("unicode_escape").decode()
