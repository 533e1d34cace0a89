"""Which tokens the trust region masked: the most frequent ones of each step on disk, those of a run in a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from .tail import records_as
from .trackers import JsonlFile

MASKED_TOKENS_FILE = "masked_tokens.jsonl"
MOST = 10


class MaskedTokenLog:
    """Appends `{"step", "masked", "tokens": [{"id", "text", "count", "share"}, ...]}` for steps that masked any.

    `masked` counts all masked tokens of the step; `tokens` are the ten ids masked most, most first, each with
    its share of those. decode: token id -> its text.
    """

    def __init__(self, run_dir: Path, decode: Callable[[int], str], resume_step: int | None):
        self._file = JsonlFile(run_dir / MASKED_TOKENS_FILE, resume_step)
        self._decode = decode

    def log(self, step: int, counts: Mapping[int, int]) -> None:
        """counts: token id -> how often the step masked it."""
        masked = sum(counts.values())
        if not masked:
            return
        most = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:MOST]
        tokens = [
            {"id": token, "text": self._decode(token), "count": count, "share": round(count / masked, 6)}
            for token, count in most
        ]
        self._file.append({"step": step, "masked": masked, "tokens": tokens})

    def close(self) -> None:
        self._file.close()


Count = Annotated[int, Field(ge=1, le=10**15)]


@dataclass
class _Token:
    id: int
    text: str
    count: Count


@dataclass
class _Step:
    masked: Count
    tokens: list[_Token]


def masked_rows(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Rank -> token, count and share in the run, from the ten of each step (the rest of a step is not kept)."""
    counts: Counter[int] = Counter()
    texts: dict[int, str] = {}
    masked = 0
    for step in records_as(_Step, records):
        masked += step.masked
        for token in step.tokens:
            counts[token.id] += token.count
            texts[token.id] = token.text
    most = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:MOST]
    return {
        str(rank): f"{texts[token]!r} {count:,} ({count / masked:.1%})" for rank, (token, count) in enumerate(most, 1)
    }
