"""Builds tokenizers that are small enough for a test."""

import json
from pathlib import Path

from dppo_megatron.hf.small_model import character_tokenizer

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


def save_character_model(directory: Path, *, vocab_size: int = 128, chat_template: str | None = None) -> Path:
    """Write a model directory with a tokenizer of one token per printable character, and no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = ["<pad>", "<eos>", *map(chr, range(32, 127)), "\n"]
    tokenizer = character_tokenizer(vocabulary, eos="<eos>", positions=10**6)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": vocab_size}))
    return directory
