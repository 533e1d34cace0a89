"""Runs micro-batches through the policy: computes per-token statistics, the loss, and the update totals.

Megatron's schedules call `forward_step` on every stage. They call the function that it returns only on the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor

from dppo_megatron.common.heartbeat import moved
from dppo_megatron.objectives import (
    Metric,
    ObjectiveOutput,
    ObjectiveProtocol,
    TopKLogprobs,
    flatten_metrics,
    mean_metric,
    merge_metrics,
    unflatten_metrics,
)
from dppo_megatron.types import TokenBatch
from dppo_megatron.vocab_parallel import DeferredChecks, TokenStatistics, linear_token_statistics, token_statistics
from dppo_megatron.vocab_parallel.collectives import all_gather

from .batch.context import gather_unequal_rows
from .batch.packing import MicroBatch
from .layout import Layout
from .model import PolicyModel

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclass(frozen=True)
class MicroBatchResult:
    """Reports a micro-batch. Scalars are fp64 tensors on the device."""

    loss: Tensor  # sum(loss_weight * loss)
    nonfinite: Tensor  # rows with non-finite logits
    metrics: dict[str, Metric]


TOKEN_VALUES = ("logprob", "entropy", "divergence", "masked")


@dataclass(frozen=True)
class LossStep:
    """Implements `forward_step` of Megatron's schedules for an update with an objective.

    masked: [V] int64 on the device; counts over all calls how often each token id was outside the trust region.
    checks: the caller reads them after all micro-batches and before it uses the gradients.
    observe: called with each micro-batch and fp32 TOKEN_VALUES [4, n] for the loss rows, without gradient.
    """

    objective: ObjectiveProtocol
    vocab_size: int
    layout: Layout
    masked: Int[Tensor, " V"]
    checks: DeferredChecks = field(default_factory=DeferredChecks)
    observe: Callable[[MicroBatch, Tensor], None] | None = None

    def __call__(self, data: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(data)
        return run_model(model, batch), partial(self.loss, batch, model)

    def loss(self, batch: MicroBatch, model: Any, output: Tensor) -> tuple[Tensor, Tensor, MicroBatchResult]:
        """Return the loss to differentiate, a token count of 0, and the report.

        Megatron's token count is unused, because `loss_weight` has the divisors. The host never waits for the device
        here, so it can prepare the next micro-batch.
        """
        objective, rows = self.objective, batch.loss
        stats = head_statistics(
            model,
            output,
            rows,
            self,
            topk_ids=_listed_ids(objective, rows),
            entropy="differentiable" if objective.needs_entropy else "metric",
        )
        nonfinite = (stats.nonfinite & rows.mask).sum().double()
        local_rows = slice(None)
        if objective.needs_sequences and self.layout.context_size > 1:
            rows, stats, local_rows = _whole_sequences(batch, stats, self.layout)
        sequence_ids = batch.sequence_ids if objective.needs_sequences else None
        out = apply_objective(
            objective,
            rows,
            logprob=stats.logprob,
            topk_logprob=stats.topk_logprob,
            other_logprob=stats.other_logprob,
            entropy=stats.entropy,
            sequence_ids=sequence_ids,
            vocab_size=self.vocab_size,
        )
        self.masked.index_add_(0, rows.target_ids[local_rows], out.masked_tokens[local_rows].long())
        assert stats.entropy is not None  # requested above
        if self.observe is not None:
            token_values = (stats.logprob, stats.entropy, out.divergence, out.masked_tokens)
            self.observe(batch, torch.stack([values.detach()[local_rows].float() for values in token_values]))
        loss = (rows.loss_weight * out.loss)[local_rows].sum()
        metrics = {"train/entropy": mean_metric(stats.entropy, rows.mask), **out.metrics}
        if local_rows != slice(None) and self.layout.context_rank > 0:  # rank 0 has measured the same whole sequences
            metrics = {name: replace(metric, sums=metric.sums * 0) for name, metric in metrics.items()}
        report = MicroBatchResult(loss.detach().double(), nonfinite, metrics)
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), report


def apply_objective(
    objective: ObjectiveProtocol,
    rows: TokenBatch,
    *,
    logprob: Tensor,
    topk_logprob: Tensor | None,
    other_logprob: Tensor | None,
    entropy: Tensor | None,
    sequence_ids: Tensor | None,
    vocab_size: int,
) -> ObjectiveOutput:
    """Apply the objective to `rows` [T], given the statistics that the trained policy computed. No collectives.

    logprob, entropy: [T], for the targets.
    topk_logprob: [T, K], for `rows.topk_ids`, then for `rows.teacher_ids` if the objective needs a teacher; or None.
    other_logprob: [T], for everything else; or None.
    """
    topk, ids, rollout = None, rows.topk_ids, rows.rollout_topk_logprob
    extra_args: dict[str, Any] = {name: rows.tensors[name] for name in objective.needs_columns}
    if objective.needs_teacher and topk_logprob is not None and other_logprob is not None:
        topk_logprob, teacher_ids_logprob = topk_logprob.tensor_split([0 if ids is None else ids.shape[1]], dim=1)
        teacher_ids, teacher_other = rows.tensors["teacher_ids"], other_logprob
        if ids is not None:
            other_logprob = _with_other_list(teacher_other, ids, teacher_ids, teacher_ids_logprob, rows.target_ids)
            teacher_other = _with_other_list(teacher_other, teacher_ids, ids, topk_logprob, rows.target_ids)
        extra_args["teacher_logprob"] = rows.tensors["teacher_logprob"]
        extra_args["teacher"] = TopKLogprobs(
            teacher_ids, rows.tensors["teacher_topk_logprob"], teacher_ids_logprob, teacher_other, rows.target_ids
        )
    if objective.needs_positions:
        extra_args["positions"] = rows.position_ids
    if topk_logprob is not None and other_logprob is not None and ids is not None and rollout is not None:
        topk = TopKLogprobs(
            ids=ids,
            rollout_logprob=rollout,
            logprob=topk_logprob,
            other_logprob=other_logprob,
            target_ids=rows.target_ids,
            vocab_size=vocab_size if rows.sampling_mask_counts is None else rows.sampling_mask_counts,
            old_logprob=rows.old_topk_logprob,
            old_other_logprob=rows.old_other_logprob,
        )
    return objective(
        logprob=logprob,
        mask=rows.mask,
        rollout_logprob=rows.rollout_logprob,
        advantage=rows.advantage,
        topk=topk,
        old_logprob=rows.old_logprob,
        reference_logprob=rows.reference_logprob,
        sequence_ids=sequence_ids,
        entropy=entropy,
        **extra_args,
    )


def _listed_ids(objective: ObjectiveProtocol, rows: TokenBatch) -> Tensor | None:
    """Return the ids [T, n] that the objective needs scored: the engine's list, then the teacher's."""
    lists = [rows.topk_ids, rows.tensors["teacher_ids"] if objective.needs_teacher else None]
    id_lists = [ids for ids in lists if ids is not None]
    return torch.cat(id_lists, dim=1) if id_lists else None


def _with_other_list(other: Tensor, own_ids: Tensor, ids: Tensor, logprob: Tensor, target: Tensor) -> Tensor:
    """Return ln of the mass [T] outside the list `own_ids` [T, K] and the target, with gradient.

    other: [T], ln of the mass outside both lists and the target.
    ids, logprob: [T, M], the other list.
    Example: own_ids [[3, 9]], ids [[9, 4]] and target [7] add the probability of 4 only.
    """
    overlap = (ids[:, :, None] == torch.cat([own_ids, target[:, None].to(own_ids.dtype)], dim=1)[:, None]).any(dim=2)
    added = torch.where((ids < 0) | overlap, _NONE, logprob)
    total = torch.cat([other.clamp(min=_NONE)[:, None], added], dim=1).logsumexp(dim=1)
    return torch.where(total > _NONE / 2, total, float("-inf"))


_NONE = -1.0e4  # replaces ln 0, because -inf would give a NaN gradient


@dataclass(frozen=True)
class LogprobStep:
    """Implements `forward_step` for scoring: collects fp32 log-probs [T, C] for each batch, 0 where mask is False.

    C is 1 (the targets) or, with `topk`, K + 2 (the targets, the top-K ids and everything else). Rows of other
    context-parallel ranks are 0. checks: as in `LossStep`.
    """

    vocab_size: int
    layout: Layout
    topk: bool = False
    checks: DeferredChecks = field(default_factory=DeferredChecks)

    def __call__(self, data: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(data)
        return run_model(model, batch), partial(self.collect, batch, model)

    def collect(self, batch: MicroBatch, model: Any, output: Tensor, non_loss_data: bool = True) -> Tensor:
        columns = torch.cat(self.columns(batch.loss, model, output), dim=1)
        scored = torch.where(batch.loss.mask[:, None], columns, 0.0)
        tokens = len(batch.host_batch.token_ids)
        return scored.new_zeros(tokens, scored.shape[1]).index_copy_(0, batch.loss_rows, scored)

    def columns(self, rows: TokenBatch, model: Any, output: Tensor) -> list[Tensor]:
        topk_ids = rows.topk_ids if self.topk else None
        stats = head_statistics(model, output, rows, self, topk_ids=topk_ids, entropy="none")
        columns = [stats.logprob[:, None]]
        if self.topk:
            assert stats.topk_logprob is not None  # both are given for a batch with top-K ids
            assert stats.other_logprob is not None
            columns += [stats.topk_logprob, stats.other_logprob[:, None]]
        return columns


@dataclass(frozen=True, kw_only=True)
class MostLikelyStep(LogprobStep):
    """Collects log-probs of each target and the `k` most likely tokens, then the ids of these tokens, [T, 1 + 2 k].

    Needs stored logits. The ids are fp32, exact below 2^24. Collective: gathers the ids of k candidates from each
    tensor-parallel rank, then scores all of them.
    """

    k: int

    def columns(self, rows: TokenBatch, model: Any, output: Tensor) -> list[Tensor]:
        layout, width = self.layout, output.shape[1]
        first = layout.tensor_rank * width
        padding = torch.arange(first, first + width, device=output.device) >= self.vocab_size
        ids = output.masked_fill(padding, float("-inf")).topk(min(self.k, width), dim=1).indices
        ids = torch.where(padding[ids], -1, ids + first)
        if layout.tensor_size > 1:
            gathered = ids.new_empty(layout.tensor_size * len(ids), ids.shape[1])
            all_gather(gathered, ids, layout.tensor_group)
            ids = gathered.view(layout.tensor_size, *ids.shape).transpose(0, 1).flatten(1)
        stats = head_statistics(model, output, rows, self, topk_ids=ids, entropy="none")
        assert stats.topk_logprob is not None  # requested
        best = stats.topk_logprob.topk(self.k, dim=1)
        return [stats.logprob[:, None], best.values, ids.gather(1, best.indices).float()]


def run_model(model: Any, batch: MicroBatch) -> Tensor:
    """Run a chunk forward, wrapped or not; the last stage returns the head's output (`PolicyModel`)."""
    moved()
    return model(
        input_ids=batch.token_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=batch.packed,
    )


def run_schedule(
    step: LossStep | LogprobStep, chunks: Sequence[Any], batches: Sequence[MicroBatch], token_budget: int, **args: Any
) -> list[Any]:
    """Run Megatron's schedule over `batches`. token_budget is only a hint: packed lengths travel with the tensors."""
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in chunks],  # every virtual stage reads all micro-batches
        model=chunks,
        num_microbatches=len(batches),
        seq_length=token_budget,
        micro_batch_size=1,
        **args,
    )


def head_statistics(
    model: Any,
    output: Tensor,
    rows: TokenBatch,
    step: LossStep | LogprobStep,
    *,
    topk_ids: Tensor | None,
    entropy: Literal["none", "metric", "differentiable"],
) -> TokenStatistics:
    """Compute statistics [n] for the last stage's output rows. All tensor-parallel ranks return the same values."""
    policy: PolicyModel = unwrap_model(model)
    layout = step.layout
    statistics = partial(token_statistics, inplace=True)
    if policy.fused_head:
        statistics = partial(
            linear_token_statistics, weight=policy.head_weight, batch_invariant=policy.batch_invariant_head
        )
    return statistics(
        output,
        target_ids=rows.target_ids,
        topk_ids=topk_ids,
        vocab_size=step.vocab_size,
        temperature=1.0 if rows.temperature is None else rows.temperature,
        group=layout.tensor_group if layout.tensor_size > 1 else None,
        entropy=entropy,
        sampling_mask_ids=rows.sampling_mask_ids,
        sampling_mask_counts=rows.sampling_mask_counts,
        tiles=layout.tensor_size if policy.exact else None,  # one tile per rank; tiles disable compilation
        check=step.checks,
    )


def _whole_sequences(
    batch: MicroBatch, stats: TokenStatistics, layout: Layout
) -> tuple[TokenBatch, TokenStatistics, slice]:
    """Gather loss rows and statistics for objectives that need whole sequences, because each rank has only parts.

    Returns:
    - the loss rows of all context-parallel ranks;
    - the statistics of these rows;
    - the slice with this rank's rows.
    Collectives: an all-gather for each statistic, and a reduce-scatter for its gradient.
    """
    counts = [max(1, len(rows)) for rows in batch.context_rows]  # a rank without loss rows still computes one row
    names = [f.name for f in fields(TokenStatistics) if f.name != "nonfinite" and getattr(stats, f.name) is not None]
    whole = {name: gather_unequal_rows(getattr(stats, name), counts, layout.context_group) for name in names}
    start = sum(counts[: layout.context_rank])
    assert batch.whole is not None  # requested with `whole_sequences`
    return batch.whole, replace(stats, **whole), slice(start, start + counts[layout.context_rank])


@dataclass(frozen=True)
class UpdateTotal:
    """Contains sums over all micro-batches of all data-parallel ranks. Metrics are on the CPU."""

    loss: float  # sum(loss_weight * loss)
    nonfinite_tokens: int  # loss tokens with non-finite logits
    tokens: int
    loss_tokens: int
    parts: dict[str, Metric]  # the metrics before the final division, to merge with other updates
    masked: dict[int, int]  # token id -> how often the token was outside the trust region, if above 0


def reduce_reports(
    results: Sequence[MicroBatchResult], batches: Sequence[MicroBatch], masked: Tensor, layout: Layout
) -> UpdateTotal:
    """Add up the reports of an update. `results` is empty before the last pipeline stage. masked: see `LossStep`.

    Collectives: three all-reduces over the data-parallel group on the last stage (none for a single replica),
    then a broadcast along the pipeline.
    """
    total: list[Any] = [_on_last_stage(results, batches, masked, layout) if layout.is_last_stage else None]
    if layout.pipeline_size > 1:
        dist.broadcast_object_list(total, group_src=layout.pipeline_size - 1, group=layout.pipeline_group)
    return total[0]


def _on_last_stage(
    results: Sequence[MicroBatchResult], batches: Sequence[MicroBatch], masked: Tensor, layout: Layout
) -> UpdateTotal:
    merged = merge_metrics([result.metrics for result in results])
    metric_sums, maxima = flatten_metrics(merged)
    counts = [sum(b.num_tokens for b in batches), sum(b.num_loss_tokens for b in batches)]
    report_sums = torch.as_tensor(sum(torch.stack([result.loss, result.nonfinite]) for result in results))
    sums = torch.cat([report_sums, report_sums.new_tensor(counts), metric_sums])
    if layout.data_group.size() > 1:
        dist.all_reduce(sums, group=layout.data_group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=layout.data_group)
        dist.all_reduce(masked, group=layout.data_group)
    sums, maxima = sums.cpu(), maxima.cpu()
    loss, nonfinite, tokens, loss_tokens = sums[:4].tolist()
    metrics = unflatten_metrics(merged, sums[4:], maxima)
    ids = masked.nonzero().flatten()
    masked_counts = dict(zip(ids.tolist(), masked[ids].tolist(), strict=True))
    return UpdateTotal(loss, int(nonfinite), int(tokens), int(loss_tokens), metrics, masked_counts)
