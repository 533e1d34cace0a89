"""What tells a torch_dist checkpoint from a Hugging Face directory; its reader takes a second to import."""

from __future__ import annotations

from pathlib import Path

from dppo_megatron.common.files import read_foreign_json

MARKER = "metadata.json"  # Megatron's: names the format of the shards
MODEL = "model"  # directory inside a converted checkpoint: config.json, tokenizer, generation config


def is_torch_dist(directory: str | Path) -> bool:
    """Whether `directory` is a Megatron checkpoint in the torch_dist format."""
    try:
        return read_foreign_json(Path(directory) / MARKER).get("sharded_backend") == "torch_dist"
    except (OSError, ValueError):
        return False


def model_directory(directory: str | Path) -> Path:
    """Where config.json and tokenizer are: inside a converted checkpoint, else in the HF directory itself."""
    inside = Path(directory) / MODEL
    return inside if is_torch_dist(directory) and inside.is_dir() else Path(directory)
