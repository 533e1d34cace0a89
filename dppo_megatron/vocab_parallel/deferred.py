"""Checks values on the device, now or later, because the host waits for all earlier work to read a value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_id_values
from .sampling_mask import SamplingMasks
from .shard import HEADER, Shard, total_columns


@dataclass(frozen=True)
class Verification:
    """Checks one call: its ids and temperatures, and whether the ranks of its group agree.

    numbers: fp64, on the device: `id_extremes`, then, if there are several ranks, their gathered headers.
    """

    target_ids: Tensor
    topk_ids: Tensor | None
    scale: float | Tensor
    shard: Shard
    masks: SamplingMasks | None
    numbers: Tensor

    def raise_if_failed(self, numbers: list[float]) -> None:
        """Raise ValueError with names and sizes. numbers: the class's numbers, on the host."""
        headers = None
        if self.shard.world > 1:
            flat = numbers[-self.shard.world * HEADER :]
            numbers = numbers[: -len(flat)]
            headers = [flat[i : i + HEADER] for i in range(0, len(flat), HEADER)]
        total = total_columns(self.shard, headers)
        vocab = total if self.shard.vocab_size is None else self.shard.vocab_size
        check_id_values(self.target_ids, self.topk_ids, self.scale, vocab, numbers, self.masks)


class DeferredChecks:
    """Collects the checks of many calls with `check=` this object, to read the device once for all of them.

    Until then the results of a call that fails its checks must not be used. The ids of pending calls stay in memory.
    """

    def __init__(self) -> None:
        self._waiting: list[Verification] = []

    def add(self, verification: Verification) -> None:
        self._waiting.append(verification)

    def raise_if_failed(self) -> None:
        """Raise the error of the first call that fails, and forget all calls. At most one synchronisation."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        sizes = [verification.numbers.numel() for verification in waiting]
        numbers = torch.cat([verification.numbers for verification in waiting]).cpu()
        for verification, part in zip(waiting, numbers.split(sizes), strict=True):
            verification.raise_if_failed(part.tolist())
