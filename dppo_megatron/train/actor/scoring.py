"""Runs forward-only passes to compute the log-probs of micro-batches under given weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dppo_megatron.types import TokenBatch

from .batch.packing import MicroBatch, Packer
from .forward import LogprobStep, run_schedule
from .layout import Layout

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Scores:
    """Contains the scores for a micro-batch at the batch temperature, fp32 on the CPU, 0 where mask is False.

    logprob: for the targets.
    topk_logprob: for topk_ids, -inf where absent; None unless requested.
    other_logprob: for the mass of all other tokens; None unless requested.
    """

    logprob: Float[Tensor, " T"]
    topk_logprob: Float[Tensor, "T K"] | None = None
    other_logprob: Float[Tensor, " T"] | None = None


@dataclass(frozen=True)
class Scorer:
    """Scores micro-batches with the current weights of `chunks` (this rank's, wrapped or not)."""

    chunks: list
    packer: Packer
    layout: Layout
    vocab_size: int
    token_budget: int  # train.micro_batch_tokens

    def __call__(self, micro_batches: Sequence[TokenBatch], *, topk: bool = False) -> list[Scores]:
        """Score the targets of each micro-batch; see `columns`.

        topk: also score the top-K ids, which micro-batches on the last pipeline stage must have.
        """
        columns = self.columns(micro_batches, LogprobStep(self.vocab_size, self.layout, topk))
        return [_scores(batch_columns.cpu(), topk) for batch_columns in columns]

    @torch.no_grad()
    def columns(self, micro_batches: Sequence[TokenBatch], step: LogprobStep) -> list[Tensor]:
        """Run a forward pass and return equal columns [T, C] from `step` on every rank of a replica.

        All ranks must call this method. An all-reduce sums each result over the context-parallel ranks. The last
        pipeline stage broadcasts the width, then each result.
        """
        prepared = self.packer.whole_rounds(micro_batches)
        scoring = {"forward_only": True, "collect_non_loss_data": True}
        results = run_schedule(step, self.chunks, prepared, self.token_budget, **scoring)
        step.checks.raise_if_failed()
        if self.layout.context_size > 1:
            for result in results:
                dist.all_reduce(result, group=self.layout.context_group)
        if self.layout.pipeline_size > 1:
            results = self._from_last_stage(results, prepared)
        return results[: len(micro_batches)]

    def _from_last_stage(self, results: list[Tensor], prepared: list[MicroBatch]) -> list[Tensor]:
        """Broadcast the results; only the last stage knows their width, because only it must have top-K ids."""
        layout = self.layout
        columns = torch.tensor(results[0].shape[1] if layout.is_last_stage else 0, device=layout.device)
        dist.broadcast(columns, group_src=layout.pipeline_size - 1, group=layout.pipeline_group)
        if not layout.is_last_stage:
            shapes = [(len(b.host_batch.token_ids), int(columns)) for b in prepared]
            results = [torch.empty(shape, dtype=torch.float32, device=layout.device) for shape in shapes]
        for result in results:
            dist.broadcast(result, group_src=layout.pipeline_size - 1, group=layout.pipeline_group)
        return results


def describe_outlier(micro_batches: Sequence[TokenBatch], scores: Sequence[Scores]) -> str:
    """Describe the loss token with the largest |ln pi - ln mu|, or a non-finite ln pi, by id, ln pi, ln mu and A."""
    largest, description = -1.0, "none has loss on this rank"
    for batch, batch_scores in zip(micro_batches, scores, strict=True):
        rows = {"ln pi": batch_scores.logprob, "ln mu": batch.rollout_logprob, "A": batch.advantage}
        values = {name: value.cpu() for name, value in rows.items() if value is not None}
        gap = (values["ln pi"] - values.get("ln mu", 0.0)).abs().nan_to_num(nan=torch.inf)
        gap = torch.where(batch.mask.cpu(), gap, -1.0)
        if len(gap) and float(gap.max()) > largest:
            largest, row = float(gap.max()), int(gap.argmax())
            numbers = ", ".join(f"{name} = {float(value[row]):.6g}" for name, value in values.items())
            description = f"token {int(batch.target_ids[row])} has {numbers}"
    return description


def _scores(columns: Tensor, topk: bool) -> Scores:
    if not topk:
        return Scores(columns[:, 0])
    return Scores(columns[:, 0].contiguous(), columns[:, 1:-1].contiguous(), columns[:, -1].contiguous())
