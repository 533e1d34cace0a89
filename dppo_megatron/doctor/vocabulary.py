"""The tokenizer as the doctor needs it, without transformers: a launcher examines its run while it goes on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

# What chat templates of the usual families write; a tokenizer of another family splits it into letters.
_MARKERS = re.compile(r"<\|[A-Za-z0-9_]{2,30}\|>|<｜[^｜<>]{2,30}｜>|\[/?INST\]|<(?:start|end)_of_turn>")


class Vocabulary:
    """Of the tokenizer.json in a model directory."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = {id_: token.content for id_, token in added.items() if token.special}
        self.size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def load(cls, model: Path) -> Vocabulary | None:
        """None where the directory has no tokenizer.json, or one that cannot be read."""
        try:
            return cls(Tokenizer.from_file(str(model / "tokenizer.json")))
        except Exception:  # tokenizers raises Exception itself
            return None

    def foreign_markers(self, text: str) -> list[str]:
        """Markers of a chat template that this tokenizer has no special token for."""
        known = set(self.special.values())
        return sorted({marker for marker in _MARKERS.findall(text) if marker not in known})

    def encodings(self, text: str) -> list[list[int]]:
        """With the special tokens that the tokenizer adds, and without."""
        return [self._tokenizer.encode(text, add_special_tokens=added).ids for added in (True, False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Of every token by itself, with the space before it where it has one; empty for ids that there are not."""
        before = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]  # some decoders strip what comes first
        start = len(self.decode(before))
        found = self._tokenizer.decode_batch([[*before, token] for token in ids], skip_special_tokens=False)
        return [text[start:] for text in found]
