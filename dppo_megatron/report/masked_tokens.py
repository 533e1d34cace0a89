"""Records the tokens that the trust region masks most in each step, and counts them over a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dppo_megatron.run_dir import RunDir

from .tail import JsonlFile, records_as

MOST = 10


class MaskedTokenLog:
    """Appends `{"step", "masked", "tokens": [{"id", "text", "count", "share"}, ...]}` for steps with masked tokens.

    masked: number of masked tokens in the step.
    tokens: the ten most masked ids, in descending order; `share` is the share of all masked tokens.
    decode: returns the text of a token id.
    """

    def __init__(self, run_dir: Path, decode: Callable[[int], str], resume_step: int | None):
        self._file = JsonlFile(RunDir(run_dir).masked_tokens, resume_step)
        self._decode = decode

    def log(self, step: int, counts: Mapping[int, int]) -> None:
        """Append a step record. `counts` maps a token id to how often the step masked the token."""
        masked = sum(counts.values())
        if not masked:
            return
        top_tokens = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:MOST]
        tokens = [
            {"id": token, "text": self._decode(token), "count": count, "share": round(count / masked, 6)}
            for token, count in top_tokens
        ]
        self._file.append({"step": step, "masked": masked, "tokens": tokens})

    def close(self) -> None:
        self._file.close()


Count = Annotated[int, Field(ge=1, le=10**15)]


@dataclass
class _MaskedToken:
    id: int
    text: str
    count: Count


@dataclass
class _MaskedStep:
    masked: Count
    tokens: list[_MaskedToken]


def masked_rows(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return rank -> token, count and share in the run, summed over the ten tokens that each step recorded.

    Example: {"1": "' the' 1,204 (12.0%)"}.
    """
    counts: Counter[int] = Counter()
    texts: dict[int, str] = {}
    masked = 0
    for step in records_as(_MaskedStep, records):
        masked += step.masked
        for token in step.tokens:
            counts[token.id] += token.count
            texts[token.id] = token.text
    top_tokens = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:MOST]
    return {
        str(rank): f"{texts[token]!r} {count:,} ({count / masked:.1%})"
        for rank, (token, count) in enumerate(top_tokens, 1)
    }
