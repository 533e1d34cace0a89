"""Tokenizers small enough to build in a test."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


def save_character_model(directory: Path, *, vocab_size: int = 128, chat_template: str | None = None) -> Path:
    """A model directory with a tokenizer of one token per printable character, and no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *map(chr, range(32, 127)), "\n"])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": vocab_size}))
    return directory
