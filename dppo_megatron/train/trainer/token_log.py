"""Store per-token values of some sequences in each update for `dppo-megatron view`.

Rank 3 writes step 12 (counted from 1) to RUN/tokens/step-000012-r003.safetensors, with n sequences end to end:

- `position`, `sample` [n] int32: prompt position, and sample in the group.
- `counts` [n] int32: number of values per sequence.
- `index` [N] int32: index of each value among the sampled tokens; with context parallelism only a part of them.
- `logprob`, `entropy` (nats), `divergence` (the method's) fp32 [N]: under the weights from which the update started.
- `masked` uint8 [N]: 1 for a masked token.

Example: counts [2, 1], index [0, 1, 4] are tokens 0 and 1 in the first sequence, and token 4 in the second.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial

import numpy as np
from torch import Tensor

from dppo_megatron.common.files import write_atomic
from dppo_megatron.common.tensors import packed
from dppo_megatron.config import Config
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.actor.batch.packing import MicroBatch
from dppo_megatron.train.actor.forward import TOKEN_VALUES
from dppo_megatron.train.actor.layout import Layout
from dppo_megatron.types import TokenBatch

from .batches import StoredSequence, UpdateBatch

log = logging.getLogger(__name__)

_Row = tuple[tuple[int, int, int], np.ndarray, np.ndarray]
"""Contains (position, sample, count), index [count] and values [4, count] for one sequence."""

_NAME = re.compile(r"step-(\d{6,})-r\d+\.safetensors")


class TokenLog:
    """Stores `tracking.token_sequences` sequences a step. Runs no collectives; only `write` waits for the device.

    On the last pipeline stage, only the first rank in each tensor-parallel group writes, because the others have the
    same tokens.
    """

    def __init__(self, config: Config, layout: Layout, resume_step: int | None):
        self._directory = RunDir(config.run.dir).tokens
        self._writes = config.tracking.token_sequences > 0 and layout.is_last_stage and layout.tensor_rank == 0
        self._rank = layout.rank
        self._readers: list[Callable[[], list[_Row]]] = []  # reads the device
        if layout.rank == 0:  # before the first update, which no other rank can finish without rank 0
            for path in self._directory.glob("step-*"):
                if (name := _NAME.fullmatch(path.name)) and int(name[1]) > (resume_step or 0):
                    path.unlink()

    def observer(self, update: UpdateBatch) -> Callable[[MicroBatch, Tensor], None] | None:
        """Return the observer to pass to `Actor.train_update` for this update; None if this rank stores nothing."""
        if not self._writes or not update.stored:
            return None
        sequences_by_batch: dict[int, list[StoredSequence]] = {}
        for sequence in update.stored:
            sequences_by_batch.setdefault(id(update.micro_batches[sequence.micro_batch]), []).append(sequence)

        def observe(batch: MicroBatch, values: Tensor) -> None:
            if batch.num_loss_tokens and (sequences := sequences_by_batch.get(id(batch.host_batch))):
                self._readers.append(partial(_rows, batch.host_batch, batch.loss_rows, values, sequences))

        return observe

    def write(self, step: int) -> None:
        """Write the finished step, counted from 1. A disk error does not stop the run."""
        row_readers, self._readers = self._readers, []
        rows = [row for rows_of_batch in row_readers for row in rows_of_batch()]
        if not rows:
            return
        names = ("position", "sample", "counts")
        arrays = {name: np.array([row[0][i] for row in rows], np.int32) for i, name in enumerate(names)}
        arrays["index"] = np.concatenate([row[1] for row in rows]).astype(np.int32)
        values = dict(zip(TOKEN_VALUES, np.concatenate([row[2] for row in rows], axis=1), strict=True))
        arrays |= values | {"masked": values["masked"].astype(np.uint8)}
        path = self._directory / f"step-{step:06d}-r{self._rank:03d}.safetensors"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, packed(arrays))
        except OSError as error:
            log.warning("%s: cannot be written, and no more tokens are stored: %s", path, error)
            self._writes = False


def _rows(batch: TokenBatch, loss_rows: Tensor, row_values: Tensor, sequences: list[StoredSequence]) -> list[_Row]:
    """Return the values for each sequence.

    loss_rows: [n] int64 on the device, this rank's loss rows in `batch`.
    row_values: [4, n] fp32 on the device.
    """
    values, at = row_values.cpu().numpy(), loss_rows.cpu().numpy()
    mask, bounds = batch.mask.numpy(), batch.cu_seqlens.numpy()
    rows = []
    for sequence in sequences:
        begin, end = bounds[sequence.number], bounds[sequence.number + 1]
        columns = np.flatnonzero((at >= begin) & (at < end))
        columns = columns[np.argsort(at[columns])]
        index = (np.cumsum(mask[begin:end]) - 1)[at[columns] - begin]
        rows.append(((sequence.position, sequence.sample, len(columns)), index, values[:, columns]))
    return [row for row in rows if len(row[1])]
