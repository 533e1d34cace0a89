"""Define errors that a user can act on, and limit their messages to a screen."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST_MESSAGE = 4000  # bytes, about a screen
_LONGEST_VALUE = 400
_SHORTEST_SHARE = 240  # least bytes per problem when there are many

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120
_repr.maxlong = 48
_repr.maxlevel = 3


class ExpectedError(Exception):
    """The message states the problem, the place and the remedy. It is shown without a traceback."""

    def __str__(self) -> str:
        return bounded(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep message and attributes in a pickle, because constructors may take arguments other than the message."""
        return _unpickled, (type(self), self.args), vars(self)


class MissingPackageError(ExpectedError, ImportError):
    """A setting needs a package that is not installed; the message names the extra that installs it."""


def _unpickled(kind: type[ExpectedError], args: tuple[Any, ...]) -> ExpectedError:
    assert kind.__base__ is not None
    error = kind.__base__.__new__(kind, *args)  # by the base class with this memory layout, e.g. OSError
    error.args = args
    return error


def shown(value: Any) -> str:
    """Return a value as Python source; a long value keeps only the beginning and end."""
    try:
        return bounded(_repr.repr(value), _LONGEST_VALUE)
    except ValueError:  # an integer of more digits than Python writes
        return f"<{type(value).__name__}>"


def bounded(text: str, limit: int = LONGEST_MESSAGE) -> str:
    """Return `text` in at most `limit` bytes; control characters and unencodable characters are escaped."""
    size = len(text)
    text = "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text[:limit])
    encoded = text.encode()
    if len(encoded) <= limit and size <= limit:
        return text
    end = f" ... ({size} characters)"
    return encoded[: limit - len(end)].decode(errors="ignore") + end


def listing(source: str, problems: Sequence[str], whole: int = 0) -> str:
    """Return "SOURCE: N problems" and a line for each problem. Problems that do not fit on a screen are only counted.

    Later problems never shorten the first `whole` problems. Among later problems, long lines share the bytes that short
    lines leave.
    """
    count, mark = len(problems), "\n  - "
    lines = [f"{bounded(source, 300)}: {count} problem{'s' if count != 1 else ''}"]
    left = LONGEST_MESSAGE - len(lines[0].encode()) - len(f"\n  ... and {count} more")
    sizes = [len((mark + bounded(problem)).encode()) for problem in problems]
    share, rest = 0, left - sum(sizes[:whole]) - count  # rounding gives each line less than one byte more
    for shorter, size in enumerate(sorted(sizes[whole:])):
        share = rest // (count - whole - shorter)
        rest -= min(size, share)
    for shown_before, problem in enumerate(problems):
        line = f"  - {bounded(problem, (left if shown_before < whole else max(_SHORTEST_SHARE, share)) - len(mark))}"
        left -= len(line.encode()) + 1
        if left < 0:
            lines.append(f"  ... and {count - shown_before} more")
            break
        lines.append(line)
    return "\n".join(lines)


def did_you_mean(name: str, candidates: Iterable[str], otherwise: str = "") -> str:
    """Return "did you mean 'a' or 'b'?" for candidates that resemble `name`, else `otherwise`.

    A candidate resembles `name` if it has all words in `name`, is spelled similarly, or has only words in `name`.
    Example: dppo_topk_tv has all words in dppo_tv, gsm8k is similar to gsm8, and mask is a word in response_mask.
    """
    folded = {other.lower(): other for other in candidates}
    close = [other for other in folded.values() if set(name.split("_")) <= set(other.split("_"))] if name else []
    close = close or [
        folded[other] for other in difflib.get_close_matches(name.lower(), sorted(folded), n=3, cutoff=0.65)
    ]
    close = close or [other for other in folded.values() if set(other.split("_")) <= set(name.split("_"))]
    return f"did you mean {' or '.join(map(repr, close))}?" if close else otherwise


def with_module(name: str) -> str:
    """Return advice to write the name of user code as `module:attribute`, "" for a name without a module.

    Example: write first.reward.reward as first.reward:reward, and first/reward.py as first.reward:NAME.
    """
    if name.endswith(".py") or "/" in name:
        return f"write {name.removesuffix('.py').strip('./').replace('/', '.')}:NAME, the NAME in that file"
    module, _, attribute = name.rpartition(".")
    return f"write {module}:{attribute}" if module else ""


def _escaped(character: str) -> str:
    return character if character == "\t" else character.encode("unicode_escape").decode()
