"""Parse JSON lines, and raise errors that name every unusable row in a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import psutil

from dppo_megatron.common.files import each_once
from dppo_megatron.errors import ExpectedError, bounded

_LONGEST_LIST = 3000  # characters for described violations; the others get only line numbers
_LONGEST_PROBLEM = 200
_LONGEST_RANGES = 300
_LONGEST_PATH = 300
_DEEPEST = 100  # levels of lists and objects; pickling and chat templates recurse over a row
_OPENING = re.compile(r"[\[{]")
# Control characters, never part of model text. A form feed is often the rest of an unescaped \frac.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class PromptFileError(ExpectedError, ValueError):
    """A prompt file cannot be used; lists every malformed line. `violations`: (line number from 1, problem)."""

    def __init__(
        self, path: Path, violations: Sequence[tuple[int, str]] = (), problem: str = "", *, unit: str = "line"
    ):
        self.violations = tuple(violations)
        count = len(self.violations)
        name = bounded(str(path), _LONGEST_PATH)
        if not count:
            super().__init__(f"{name}: {problem}")
            return
        groups: dict[str, list[int]] = {}  # equal problems share one line
        for number, text in self.violations:
            groups.setdefault(bounded(text, _LONGEST_PROBLEM), []).append(number)
        lines, size, rest = [], 0, []
        for text, numbers in groups.items():
            if size > _LONGEST_LIST:
                rest += numbers
                continue
            rows = f"{len(numbers)} {unit}s ({_ranges(numbers)})" if len(numbers) > 1 else f"{unit} {numbers[0]}"
            lines.append(f"  - {rows}: {text}")
            size += len(lines[-1].encode())
        if rest:
            lines.append(f"  - and {unit}s {_ranges(sorted(rest))}")
        super().__init__("\n".join([f"{name}: {count} malformed {unit}{'s' if count != 1 else ''}", *lines]))


def memory_for_rows() -> int:
    """Return half of the free memory in bytes."""
    return psutil.virtual_memory().available // 2


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Return the numbered lines of a file. Raises `PromptFileError` when the file cannot be read."""
    try:
        if (size := path.stat().st_size) > memory_for_rows():
            raise PromptFileError(path, problem=f"{size} bytes, more than half of the free memory; leave out rows")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise PromptFileError(path, problem=f"cannot read the prompt file: {error.strerror}") from error
    if lines and lines[0].startswith(b"\xff\xfe"):
        raise PromptFileError(path, problem="UTF-16; save it as UTF-8 (`iconv -f UTF-16 -t UTF-8 FILE`)")
    while lines and not lines[-1].strip():
        lines.pop()
    if lines and lines[0].lstrip()[:1] == b"[" and lines[-1].rstrip()[-1:] == b"]":
        raise PromptFileError(path, problem="a JSON list; write one JSON object a line (`jq -c '.[]' FILE`)")
    return enumerate(lines, start=1)


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the object in a line. Raises `ValueError` if it is not an object, is ambiguous or nested too deeply."""
    if not line.strip():
        raise ValueError("blank; remove it")
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    columns = parse_json(text)
    if not isinstance(columns, dict):
        raise ValueError(f"expected a JSON object, found {type(columns).__name__}")
    return columns


def parse_json(text: str) -> Any:
    """Return a JSON value. Raises `ValueError` if it is ambiguous, nested too deeply, or has half a surrogate pair."""
    try:
        value = json.loads(text, object_pairs_hook=each_once)
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" enclosed in double quotes").removesuffix(" at")
        raise ValueError(f"not JSON: {problem} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError(f"nested more than {_DEEPEST} levels deep") from None
    if sum(1 for _ in _OPENING.finditer(text)) > _DEEPEST and _is_deep(value):
        raise ValueError(f"nested more than {_DEEPEST} levels deep")
    if "\\u" in text:
        check_text(json.dumps(value, ensure_ascii=False), "it", control=False)
    return value


def check_text(text: str, subject: str, *, control: bool = True) -> None:
    """Raise `ValueError` for text that is not valid UTF-8, or with control characters other than tab and line ends."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code_point = f"U+{ord(text[error.start]):04X}"
        raise ValueError(f"{subject} has half a surrogate pair, {code_point}, which is not text") from None
    if control and (match := _CONTROL.search(text)):
        hint = "; a LaTeX command whose backslash was not escaped?" if match[0] in "\x08\x0c" else ""
        raise ValueError(
            f"{subject} has the control character U+{ord(match[0]):04X} at character {match.start() + 1}{hint}"
        )


def column(columns: dict[str, Any], name: str, setting: str) -> Any:
    """Return a column value, or a field in a column: `reward_model.ground_truth`, `prompt.0.content`.

    Raises `ValueError` if it does not exist.
    """
    if name in columns:
        return columns[name]
    value: Any = columns
    prefix = ""
    for part in name.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isascii() and part.isdigit() and int(part[:9]) < len(value):
            value = value[int(part)]
        else:
            parent = f"its {prefix[:-1]!r}" if value is not columns else "it"
            keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
            raise ValueError(f"no column {name!r} ({setting}); {parent} has {shorten_list(map(repr, keys)) or 'none'}")
        prefix += f"{part}."
    return value


def shorten_list(names: Iterable[str], longest: int = 120) -> str:
    text = ", ".join(names)
    return text if len(text) <= longest else text[:longest] + " ..."


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        wholes = [part for part in level if isinstance(part, (dict, list))]
        level = list(chain.from_iterable(whole.values() if isinstance(whole, dict) else whole for whole in wholes))
    return any(isinstance(part, (dict, list)) for part in level)


def _ranges(numbers: Iterable[int]) -> str:
    """Return [1, 4, 5, 6] as "1, 4-6", shortened to fit."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return shorten_list((str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans), _LONGEST_RANGES)
