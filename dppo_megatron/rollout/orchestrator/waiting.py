"""Store sampled groups until the bank has them: in memory up to a limit, beyond it in files.

Groups wait for rewards, for slower groups that must be stored first, and for the disk. If response lengths differ
much, most groups of a step may wait, too many for the process memory.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from dppo_megatron.rollout.engines.byte_budget import ByteBudget
from dppo_megatron.types import Rollout

log = logging.getLogger(__name__)

_ALIGNMENT = 64


class WaitingGroups:
    """Charges the bytes of waiting groups to `budget`; groups beyond half of the limit are spilled to `directory`.

    At least half of the limit thus remains for arriving replies. Files have no name and are deleted with the group.
    """

    def __init__(self, budget: ByteBudget, directory: Path):
        self._budget = budget
        self._directory = directory
        self._sizes: dict[int, int] = {}  # bytes by prompt position

    async def keep(self, position: int, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """Return a group's samples, in memory or in a file; `release` them afterwards."""
        size = sum(array.nbytes for rollout in rollouts for _, array in _arrays(rollout))
        fits = self._budget.charged + size <= self._budget.limit // 2
        self._sizes[position] = size
        self._budget.charge(size)
        if fits or not size:
            return tuple(rollouts)
        try:
            mapped_rollouts = await asyncio.to_thread(spill, rollouts, self._directory)
        except OSError as error:
            log.warning("prompt %d waits in memory: %s: %s", position, self._directory, error)
            return tuple(rollouts)
        self.release(position)
        return mapped_rollouts

    def release(self, position: int) -> None:
        """Return a group's bytes to the budget, after it was stored, dropped or given up."""
        self._budget.refund(self._sizes.pop(position, 0))


def spill(rollouts: Sequence[Rollout], directory: Path) -> tuple[Rollout, ...]:
    """Return equal samples with arrays mapped from an unnamed file in `directory`; not all arrays may be empty.

    Raises OSError.
    """
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        layouts = [{name: (_write(file, array), array) for name, array in _arrays(r)} for r in rollouts]
        # Unlike the standard library's mmap, it keeps no descriptor open: there may be thousands of groups.
        mapped = torch.from_file(f"/proc/self/fd/{file.fileno()}", size=file.tell(), dtype=torch.uint8).numpy()
        mapped.flags.writeable = False
    mapped_rollouts = []
    for rollout, layout in zip(rollouts, layouts, strict=True):
        arrays: dict[str, Any] = {
            name: np.frombuffer(mapped, array.dtype, array.size, offset).reshape(array.shape)
            for name, (offset, array) in layout.items()
        }
        mapped_rollouts.append(replace(rollout, **arrays))
    return tuple(mapped_rollouts)


def _arrays(rollout: Rollout) -> Iterator[tuple[str, np.ndarray]]:
    for field in fields(rollout):
        array = getattr(rollout, field.name)
        if isinstance(array, np.ndarray) and array.size:
            yield field.name, array


def _write(file: IO[bytes], array: np.ndarray) -> int:
    """Write an array and return its offset in the file."""
    offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
    file.seek(offset)
    remaining = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while remaining:
        remaining = remaining[file.write(remaining) :]
    return offset
