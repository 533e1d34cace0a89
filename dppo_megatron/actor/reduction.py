"""Reports of micro-batches to totals that every rank knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dppo_megatron.objectives import Metric, flatten_metrics, merge_metrics, unflatten_metrics

from .batch.packing import MicroBatch
from .forward import MicroBatchResult
from .layout import Layout


@dataclass(frozen=True)
class UpdateTotal:
    """Sums over all micro-batches of all data-parallel ranks; metrics on the CPU."""

    loss: float
    nonfinite: int
    tokens: int
    loss_tokens: int
    metrics: dict[str, Metric]
    masked: dict[int, int]  # token id -> count, where above 0


def reduce_reports(
    results: Sequence[MicroBatchResult], batches: Sequence[MicroBatch], masked: Tensor, layout: Layout
) -> UpdateTotal:
    """Add up this update's reports. `results` is empty before the last pipeline stage. masked: see `LossStep`.

    Collectives: three all-reduces over the data-parallel group on the last stage (none for a single replica),
    then one broadcast along the pipeline.
    """
    total = _on_last_stage(results, batches, masked, layout) if layout.is_last_stage else None
    if layout.pipeline_size > 1:
        box = [total]
        dist.broadcast_object_list(box, group_src=layout.pipeline_size - 1, group=layout.pipeline_group)
        total = box[0]
    return total


def _on_last_stage(
    results: Sequence[MicroBatchResult], batches: Sequence[MicroBatch], masked: Tensor, layout: Layout
) -> UpdateTotal:
    merged = merge_metrics([result.metrics for result in results])
    metric_sums, maxima = flatten_metrics(merged)
    counts = [sum(b.num_tokens for b in batches), sum(b.num_loss_tokens for b in batches)]
    own = torch.stack([sum(r.loss for r in results), sum(r.nonfinite for r in results)])
    sums = torch.cat([own, own.new_tensor(counts), metric_sums])
    if layout.data_group.size() > 1:
        dist.all_reduce(sums, group=layout.data_group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=layout.data_group)
        dist.all_reduce(masked, group=layout.data_group)
    sums, maxima = sums.cpu(), maxima.cpu()
    loss, nonfinite, tokens, loss_tokens = sums[:4].tolist()
    metrics = unflatten_metrics(merged, sums[4:], maxima)
    ids = masked.nonzero().flatten()
    counts = dict(zip(ids.tolist(), masked[ids].tolist(), strict=True))
    return UpdateTotal(loss, int(nonfinite), int(tokens), int(loss_tokens), metrics, counts)
