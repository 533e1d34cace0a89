"""Read a tokenizer without importing transformers, and check whether it wrote a bank's prompts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from dppo_megatron.common.files import read_foreign_json
from dppo_megatron.types import RolloutGroup

# Common chat templates have these markers. A tokenizer of another family splits them into letters.
_MARKERS = re.compile(r"<\|[A-Za-z0-9_]{2,30}\|>|<｜[^｜<>]{2,30}｜>|\[/?INST\]|<(?:start|end)_of_turn>")


class TokenizerFile:
    """Represents the tokenizer.json in a model directory."""

    def __init__(self, tokenizer: Tokenizer, rows: int = 0):
        """Store the tokenizer. rows: number of embedding rows, often padded; a policy samples padding too."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = {id_: token.content for id_, token in added.items() if token.special}
        self.size = max(rows, max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1)

    @classmethod
    def load(cls, model: Path) -> TokenizerFile | None:
        """Load the directory's tokenizer.json. Return None if it is absent or unreadable."""
        try:
            path = model / "config.json"
            config = read_foreign_json(path) if path.exists() else {}
            rows = config.get("text_config", config).get("vocab_size", 0)
            return cls(Tokenizer.from_file(str(model / "tokenizer.json")), rows)
        except Exception:  # tokenizers raises Exception itself
            return None

    def foreign_markers(self, text: str) -> list[str]:
        """Return the chat-template markers in `text` for which this tokenizer has no special token."""
        special_tokens = set(self.special.values())
        return sorted({marker for marker in _MARKERS.findall(text) if marker not in special_tokens})

    def mismatch(self, group: RolloutGroup, *, truncated: bool) -> str:
        """Return how a stored group contradicts this tokenizer; empty if the tokenizer may have written the group.

        truncated: whether prompts may have been cut. A cut prompt's text was decoded from the ids, so any ids that
        decode to a part of this text are accepted.
        """
        text, ids = group.prompt.text, group.prompt.token_ids.tolist()
        encodings = [self._tokenizer.encode(text, add_special_tokens=added).ids for added in (True, False)]
        if ids not in encodings and not (truncated and self.decode(ids).strip("\ufffd") in text):
            return "encodes its text as other token ids"
        largest = max((int(r.token_ids.max()) for r in group.rollouts if len(r.token_ids)), default=0)
        return f"has {self.size} tokens, and token {largest} was sampled" if largest >= self.size else ""

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, including a leading space. An unknown id has an empty text."""
        prefix = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]  # some decoders strip the first token
        start = len(self.decode(prefix))
        texts = self._tokenizer.decode_batch([[*prefix, token] for token in ids], skip_special_tokens=False)
        return [text[start:] for text in texts]
