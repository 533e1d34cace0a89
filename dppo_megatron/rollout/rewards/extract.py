"""Find the answer in a response. Every function takes linear time for any text."""

from __future__ import annotations

import re
from collections.abc import Iterator

# A line break, \\, is one token, so that the brace after it is not escaped.
_BOX_OR_BRACE = re.compile(r"\\boxed\s*\{|\\\\(?!boxed)|\\[{}]|[{}]")
# Matches `Answer:` and `**Answer** is:`; Markdown may follow the word.
_ANSWER_LINE = re.compile(r"(?i)(?<![a-z])answer[*_`]{0,3}(?: is)?[ \t]?[*_`]{0,3}[:：]")
_MARKDOWN = " \t\r*_`"


def boxes(text: str, longest: int) -> Iterator[tuple[int, str]]:
    """Yield (index, content) of every \\boxed{...} that closes within `longest` characters, ordered by their ends."""
    open_braces: list[tuple[int, int] | None] = []  # for a box: (box start, content start)
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


def answer_line(text: str) -> tuple[int, str] | None:
    """Return (index, rest of the line) of the last `Answer:`. If the rest is empty, return the next line instead."""
    matches = list(_ANSWER_LINE.finditer(text))
    if not matches:
        return None
    line = text[matches[-1].end() :].lstrip(_MARKDOWN + "\n").partition("\n")[0]
    return matches[-1].start(), line.strip(_MARKDOWN)


def last_answer(text: str, longest: int) -> str | None:
    """Return the last box or `Answer:` line in the text, or None if it has neither."""
    candidates = list(boxes(text, longest))
    if (line := answer_line(text)) is not None:
        candidates.append(line)
    return max(candidates)[1] if candidates else None


def depth(text: str) -> int:
    """Return how deeply braces, brackets and parentheses nest in the text, closed or not."""
    deepest = level = 0
    for character in text:
        if character in "{[(":
            level += 1
            deepest = max(deepest, level)
        elif character in "}])":
            level -= 1
    return deepest
