"""Defines the names and the retention of checkpoints on disk.

    checkpoints/step-000012/    weights and optimizer as shards, rng/, run.json (written last)
    checkpoints/latest          name of the newest complete checkpoint, written afterwards

A checkpoint is written as step-000012.tmp and renamed when every rank has finished, so a checkpoint with a final name
is complete.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from dppo_megatron.common.files import read_foreign_json, replace_directory, write_atomic, write_json
from dppo_megatron.errors import ExpectedError

RNG = "rng"
REMEDY = "remove the newest checkpoint to resume from the one before it"
_RUN, _LATEST, _PREFIX, _TMP = "run.json", "latest", "step-", ".tmp"


class CheckpointError(ExpectedError, RuntimeError):
    """Raised, with every reason, for a checkpoint that cannot be written or does not fit this run."""


def final_path(directory: Path, step: int) -> Path:
    return directory / f"{_PREFIX}{step:06d}"


def partial_path(final: Path) -> Path:
    return final.with_name(final.name + _TMP)


def complete(partial: Path, final: Path, run: dict[str, Any], keep: int) -> None:
    """Write run.json, rename the flushed files to the final name, and remove all but the newest `keep`."""
    write_json(partial / _RUN, run, indent=1)
    replace_directory(partial, final)
    write_atomic(final.parent / _LATEST, final.name)
    _prune(final.parent, final, keep)


def newest(directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the path and the run.json of the newest checkpoint, or None without a checkpoint.

    `latest` names the newest checkpoint. If a crash prevented that, the checkpoint with the highest step is the newest.
    Raises CheckpointError if the files cannot be read.
    """
    latest_path = directory / _LATEST
    try:
        candidates = sorted(_whole(directory), reverse=True)
        if latest_path.is_file() and (directory / latest_path.read_text().strip()) in candidates:
            candidates = [directory / latest_path.read_text().strip()]
        return (candidates[0], read_foreign_json(candidates[0] / _RUN)) if candidates else None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoints in {directory} cannot be read: {type(error).__name__}: {error}; {REMEDY}"
        ) from error


def kept_steps(directory: Path) -> list[int]:
    """Return the steps that have complete checkpoints, ascending."""
    return sorted(int(path.name.removeprefix(_PREFIX)) for path in _whole(directory))


def _whole(directory: Path) -> list[Path]:
    return [p for p in directory.glob(f"{_PREFIX}*") if p.suffix != _TMP and (p / _RUN).exists()]


def _prune(directory: Path, newest: Path, keep: int) -> None:
    """Remove incomplete checkpoints and older checkpoints beyond `keep`. A failed removal must not stop a run."""
    older = [p for p in sorted(_whole(directory), reverse=True) if p != newest]
    for path in [*older[keep - 1 :], *directory.glob(f"{_PREFIX}*{_TMP}"), *directory.glob(f".{_PREFIX}*")]:
        shutil.rmtree(path, ignore_errors=True)
