"""Where the answer stands in a response. Every function takes time linear in the text, whatever the text."""

from __future__ import annotations

import re
from collections.abc import Iterator

_BOX_OR_BRACE = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")


def boxes(text: str, longest: int) -> Iterator[tuple[int, str]]:
    """(place, content) of every \\boxed{...} whose braces close within `longest` characters, as they close."""
    open_braces: list[tuple[int, int] | None] = []  # of a box, where it begins and where its content does
    for match in _BOX_OR_BRACE.finditer(text):
        token = match[0]
        if token == "{":
            open_braces.append(None)
        elif token == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None and match.start() - box[1] <= longest:
                yield box[0], text[box[1] : match.start()]
        elif len(token) > 2:
            open_braces.append((match.start(), match.end()))


def depth(text: str) -> int:
    """Levels of braces, brackets and parentheses in the text, closed or not."""
    deepest = level = 0
    for character in text:
        if character in "{[(":
            level += 1
            deepest = max(deepest, level)
        elif character in "}])":
            level -= 1
    return deepest
