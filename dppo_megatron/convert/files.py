"""Computes fingerprints of source files, and finds a Megatron checkpoint and the checkpoint's HF directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dppo_megatron.config import read_tree
from dppo_megatron.config.load import run_of
from dppo_megatron.hf import ModelError
from dppo_megatron.hf.torch_dist_place import is_torch_dist, model_directory
from dppo_megatron.run_dir import RunDir


def fingerprint_of(directory: Path) -> dict[str, Any]:
    """Return size and modification time of every file. Equal fingerprints mean that no file was written in between."""
    files = {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(directory.iterdir()) if p.is_file()}
    return {"directory": str(directory.resolve()), "files": files}


def find_checkpoint(path: Path) -> Path | None:
    """Find a checkpoint as `checkpoint_at` does, but return None if there is no Megatron checkpoint."""
    path = run_of(path)
    for directory in (path, path / "checkpoints"):
        latest = directory / "latest"
        checkpoint = directory / latest.read_text(errors="replace").strip() if latest.is_file() else directory
        if is_torch_dist(checkpoint):
            return checkpoint
    return None


def checkpoint_at(path: Path) -> Path:
    """Return `path`, or the newest checkpoint if `path` is a run or a `checkpoints` directory.

    Raises `ModelError` if there is no Megatron checkpoint.
    """
    if checkpoint := find_checkpoint(path):
        return checkpoint
    reason = "not a Megatron torch_dist checkpoint, nor a run that has one" if path.exists() else "no such directory"
    if (path / "config.json").exists():
        raise ModelError(str(path), ["a Hugging Face directory, no Megatron checkpoint; convert it by hf-to-megatron"])
    steps = sorted(p.name for p in path.parent.glob("step-*") if is_torch_dist(p))
    remedy = f"{path.parent} has {', '.join(steps[-5:])}" if steps else "name a run, or RUN/checkpoints/step-N"
    raise ModelError(str(path), [f"{reason}; {remedy}"])


def template_for(checkpoint: Path) -> Path:
    """Return the HF directory with a checkpoint's config.json and tokenizer.

    It is inside the checkpoint, or the run's model.path. Raises `ModelError` if neither exists, and `ConfigError` if
    the run's config cannot be read.
    """
    if (inside := model_directory(checkpoint)) != checkpoint:
        return inside
    run = checkpoint.parent.parent / "config.yaml"
    if run.is_file():
        model = read_tree(run)[0].get("model")
        path = model.get("path") if isinstance(model, dict) else None
        if template := RunDir(run.parent).model(path if isinstance(path, str) else None):
            return template
    raise ModelError(
        str(checkpoint), ["its config.json cannot be found; pass its Hugging Face directory as --template"]
    )
