"""Writes a weight directory from many ranks. The directory appears with all files or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from dppo_megatron.common.ranks import Ranks

from .safetensors_file import TensorInfo
from .safetensors_writer import (
    Part,
    check_space,
    create_staging,
    publish,
    refuse_existing,
    refuse_incomplete,
    staging_of,
)


def write_staged(
    directory: Path,
    expected: Mapping[str, TensorInfo] | None,
    everyone: Ranks,
    *,
    write: Callable[[Path], list[Part]],
    complete: Callable[[Path, list[Part]], None],
    overwrite: bool = False,
    durable: bool = True,
) -> None:
    """Write all ranks' parts to a staging directory, and rename it to `directory` when it is complete.

    Every rank calls `write(staging)`, which returns the written parts. All parts together must contain exactly the
    tensors in `expected`; with None any parts are accepted. Rank 0 then calls `complete(staging, all parts)`, which
    gives the files their final form, and renames the directory. With `durable` it first waits until all files are on
    disk.

    Collective: all ranks synchronize three times. An error on any rank is raised on every rank, and no files remain.
    Raises `OSError`. Raises `ModelError` for too little disk space, for an existing directory without `overwrite`, and
    for tensors that are missing, unknown or written twice.
    """
    staging = staging_of(directory)

    def prepare() -> None:
        if everyone.rank == 0:
            refuse_existing(directory, overwrite)
            create_staging(directory)
            check_space(staging, sum(info.nbytes for info in (expected or {}).values()))

    def finish() -> None:
        if everyone.rank == 0:
            parts = [part for rank_parts in written for part in rank_parts]
            if expected is not None:
                refuse_incomplete(directory, parts, expected)
            complete(staging, parts)
            publish(staging, directory, overwrite, durable=durable)

    try:
        everyone.on_every_rank(prepare, f"{directory} to be prepared")
        written = everyone.on_every_rank(lambda: write(staging), f"the weights of {directory} to be written")
        everyone.on_every_rank(finish, f"{directory} to be completed")
    except Exception:
        if everyone.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise
