"""List the private names that we use in a server package, and check them against the installed version.

The `internals.txt` of each kind of engine contains the names. Depends only on the standard library, because the SGLang
environment also runs this file, by path.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ENGINES = Path(__file__).parents[2] / "dppo_megatron/rollout/engines"
_LINE = re.compile(r"(?P<path>[\w.:]+)(?:\((?P<passed>.*?)\))?(?:\[(?P<read>.*?)\])?  (?P<why>.+)")


class Internal(NamedTuple):
    """Describes a private name and how we use it, from a line such as `m:Cls.f(self, mode=)  weight updates`.

    This line names a method that we hook, or call with `mode=`.
    """

    path: str  # module:name
    purpose: str
    passed: tuple[str, ...] | None = None  # "self", "name=", or "_" for a positional argument; None = we do not call it
    attributes: tuple[str, ...] = ()  # instance attributes that we read or set

    def problem(self) -> str | None:
        """Return how the installed version differs from this entry, or None if it matches."""
        module, _, names = self.path.partition(":")
        try:
            target = import_module(module)
            for name in filter(None, names.split(".")):
                target = getattr(target, name)
        except (ImportError, AttributeError) as error:
            return f"{self.path} ({self.purpose}) is absent: {error}"
        if self.passed is not None and (mismatch := _refuses(target, self.passed)):
            return f"{self.path} ({self.purpose}) takes other arguments: {mismatch}"
        if lost := [name for name in self.attributes if not _has(target, name)]:
            return f"{self.path} ({self.purpose}) has no {', '.join(lost)}"
        return None


def names_of(kind: str) -> tuple[list[str], list[Internal]]:
    """Return the public modules and the private names in the internals.txt of `kind`."""
    public, names = [], []
    for line in (ENGINES / kind / "internals.txt").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "public":
            public = rest.split()
        elif word != "#":
            if (match := _LINE.fullmatch(line)) is None:
                raise ValueError(f"{kind}/internals.txt: {line!r} is not a name and its use")
            passed, attributes = (None if match[part] is None else _items(match[part]) for part in ("passed", "read"))
            names.append(Internal(match["path"], match["why"], passed, attributes or ()))
    return public, names


def _items(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _refuses(function: Any, passed: tuple[str, ...]) -> str | None:
    positional = [None for name in passed if name in ("self", "_")]
    try:
        inspect.signature(function).bind(*positional, **{name[:-1]: None for name in passed if name.endswith("=")})
    except TypeError as error:
        return str(error)
    return None


def _has(cls: Any, name: str) -> bool:
    """Return whether instances of `cls` have the attribute. It is enough that the class source names the attribute."""
    if hasattr(cls, name):
        return True
    classes = [c for c in cls.__mro__ if c.__module__.split(".")[0] in ("vllm", "sglang")]
    sources = "".join(map(inspect.getsource, classes))
    return f"self.{name}" in sources or f" {name}:" in sources


if __name__ == "__main__":  # prints the problem with each name for the given kind
    del sys.path[0]  # the server must not import modules of this folder
    print(json.dumps({entry.path: entry.problem() for entry in names_of(sys.argv[1])[1]}))
