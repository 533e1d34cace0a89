"""Draft a sample's next tokens from earlier samples of the prompt. Depends only on numpy.

The engine still samples every drafted position itself. A wrong draft therefore costs time but never changes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SUFFIXES = (16, 8, 4, 2)  # suffix lengths to look up, longest first
MAX_TOKENS = 1 << 15  # limit per prompt; the index takes about 800 bytes per token, and as much for dropped tokens
MAX_PLACES = 16  # a draft follows the newest occurrences of a suffix, at most this many
PRIOR = 10.0  # a new prompt's rate starts with the overall rate, weighted like this many tested tokens
LOWEST = 0.35  # a new prompt starts with at least this rate, so that it gets a few drafts
MEMORY = 1000.0  # after this many tested tokens, older tokens count half
STEP_ROWS = 12.0  # fixed time of a decoding step over the time of one row, on CPUs (docs/engines.md)
_END = -1  # follows the last token of each sequence


def worth(running: int) -> float:
    """Return the lowest acceptance probability at which a position is drafted while `running` samples run.

    A step with R rows takes a + b R seconds. A drafted row adds b seconds. If the draft is accepted, it saves a
    sample's share of a step, a / R + b. Example for a / b = `STEP_ROWS` = 12: 0.08 for 1 sample, 0.4 for 8, and 0.73
    for 32.
    """
    return running / (running + STEP_ROWS)


@dataclass
class DraftRate:
    """Compares how many tested tokens were accepted with how many were expected to be, the sum of their shares."""

    expected: float = 50.0
    accepted: float = 40.0

    @property
    def rate(self) -> float:
        return min(self.accepted / self.expected, 1.0)

    def add(self, expected: float, accepted: int) -> None:
        if self.expected > MEMORY:
            self.expected, self.accepted = self.expected / 2, self.accepted / 2
        self.expected += expected
        self.accepted += accepted


class SuffixIndex:
    """Finds the longest suffix of a sample that occurred before, and follows the most frequent continuation.

    The index is a suffix trie over the `add`ed sequences, limited to the nodes that drafts use. Nodes exist at the
    depths in `SUFFIXES`. A draft reads the continuations below a node from the sequences. New sequences are indexed at
    the next draft.

    If k of n occurrences share a continuation, the estimated acceptance probability is k / n times an acceptance rate.
    The rate starts with the rate over all prompts and is learned from the drafts for this prompt. A draft ends where
    the product of these probabilities falls below `worth`, so a prompt with low acceptance gets no drafts.

    Example: after adding [5, 7, 2, 9] and [5, 7, 2, 4, 6], the suffix [5, 7] continues with 2 in both, and then with 4,
    because 4 is newer than 9.
    """

    def __init__(self, overall: DraftRate | None = None) -> None:
        """Create an empty index. `overall` is the rate over all prompts; their indexes share it."""
        self._sequences: list[np.ndarray] = []
        self._size = 0  # number of tokens in all sequences
        self._indexed = 0  # number of indexed sequences
        self._tokens: list[int] = []  # indexed sequences end to end, each followed by _END
        self._begin = 0  # earlier places belong to dropped sequences
        self._places: dict[bytes, list[int]] = {}  # suffix -> index in `_tokens` of the token after each occurrence
        self._overall = overall or DraftRate()
        self._rate: DraftRate | None = None  # None until the first draft

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Add a response, preceded by the prompt end. Drop the oldest sequences above `MAX_TOKENS`."""
        self._sequences.append(np.asarray(tokens, np.int32)[:MAX_TOKENS])
        self._size += len(self._sequences[-1])
        while self._size > MAX_TOKENS:
            dropped = self._sequences.pop(0)
            self._size -= len(dropped)
            if self._indexed:
                self._indexed -= 1
                self._begin += len(dropped) + 1
        if self._begin > MAX_TOKENS:  # dropped sequences take at most half the index
            self.shrink()

    def shrink(self) -> None:
        """Free the index memory. The next draft rebuilds the index."""
        self._indexed, self._begin, self._tokens, self._places = 0, 0, [], {}

    def draft(self, suffix: np.ndarray, limit: int, running: int) -> tuple[list[int], list[float]]:
        """Return at most `limit` likely next tokens, and for each of them the share of occurrences with that token.

        suffix: int32, the last tokens of prompt and sample; at least max(SUFFIXES) tokens, or all.
        running: number of samples in the decoding step.
        """
        self._index()
        key = np.ascontiguousarray(suffix, np.int32).tobytes()
        matches = next((f for n in SUFFIXES if (f := self._matches(key[-4 * n :])) and len(key) >= 4 * n), None)
        tokens: list[int] = []
        shares: list[float] = []
        if not matches:
            return tokens, shares
        self._rate = self._rate or DraftRate(PRIOR, PRIOR * max(LOWEST, self._overall.rate))
        places, rate, probability, least = matches, self._rate.rate, 1.0, worth(running)
        while len(tokens) < limit:
            following: dict[int, list[int]] = {}
            for place in places:
                following.setdefault(self._tokens[place], []).append(place + 1)
            token, continued = max(following.items(), key=lambda item: (len(item[1]), item[1][-1]))
            share = len(continued) / len(places)
            probability *= share * rate
            if token == _END or probability < least:
                break
            tokens.append(token)
            shares.append(share)
            places = continued
        return tokens, shares

    def tested(self, shares: Sequence[float], accepted: int) -> None:
        """Record that the first `accepted` tokens of a draft were sampled and that the next token, if any, was not."""
        for counts in filter(None, (self._rate, self._overall)):
            counts.add(sum(shares[: accepted + 1]), accepted)

    def _matches(self, suffix: bytes) -> list[int]:
        """Return the newest places that follow the suffix, oldest first."""
        newest = self._places.get(suffix, ())[-MAX_PLACES:]
        return [place for place in newest if place >= self._begin]

    def _index(self) -> None:
        for tokens in self._sequences[self._indexed :]:
            start, key = len(self._tokens), tokens.tobytes()
            self._tokens += [*tokens.tolist(), _END]
            for end in range(min(SUFFIXES), len(tokens)):
                for n in SUFFIXES:
                    if n <= end:
                        self._places.setdefault(key[4 * (end - n) : 4 * end], []).append(start + end)
        self._indexed = len(self._sequences)
