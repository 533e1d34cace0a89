"""Distinguishes torch_dist checkpoints from Hugging Face directories, without the checkpoint reader's slow import."""

from __future__ import annotations

from pathlib import Path

from dppo_megatron.common.files import read_foreign_json

MARKER = "metadata.json"  # Megatron's file that names the shard format
MODEL = "model"  # directory inside a converted checkpoint: config.json, tokenizer, generation config


def is_torch_dist(directory: str | Path) -> bool:
    """Return whether `directory` is a Megatron checkpoint in the torch_dist format."""
    try:
        return read_foreign_json(Path(directory) / MARKER).get("sharded_backend") == "torch_dist"
    except (OSError, ValueError):
        return False


def model_directory(directory: str | Path) -> Path:
    """Return the directory with config.json and tokenizer: inside a converted checkpoint, else `directory` itself."""
    inside = Path(directory) / MODEL
    return inside if is_torch_dist(directory) and inside.is_dir() else Path(directory)
