"""Defines token_statistics: statistics from stored logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from . import checks
from .checks import DeferredChecks
from .merge import empty_rows
from .request import Request
from .shard import make_shard
from .statistics import TokenStatistics

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def token_statistics(
    logits: Float[Tensor, "T V_local"],
    target_ids: Int[Tensor, " T"],
    topk_ids: Int[Tensor, "T K"] | None = None,
    vocab_size: int | None = None,
    temperature: float | Float[Tensor, " T"] = 1.0,
    group: dist.ProcessGroup | None = None,
    entropy: Literal["none", "metric", "differentiable"] = "metric",
    backend: Literal["auto", "torch", "triton"] = "auto",
    *,
    sampling_mask_ids: Int[Tensor, " N"] | None = None,
    sampling_mask_counts: Int[Tensor, " T"] | None = None,
    loss_mask: Bool[Tensor, " T"] | None = None,
    vocab_start: int | None = None,
    tiles: int | None = None,
    inplace: bool | None = None,
    check: bool | DeferredChecks = True,
) -> TokenStatistics:
    """Return log-probs of the target, of top-K ids and of all other tokens, and the entropy, from sharded logits.

    Sharding: logits are split over `group` by columns. Rank r has columns [r V_local, (r + 1) V_local), or
    [vocab_start, vocab_start + V_local) if every rank passes vocab_start; shards may then differ in size. All other
    arguments are replicated, and so are the results, bit for bit.
    Collectives: the forward pass runs one all-gather of [T + 1, 1 + K + 3] fp32 (none without a group). With `tiles`,
    each tile on the rank adds T rows. The backward pass runs none.
    Accumulation is in fp32, or in float64 for float64 logits.

    Args:
        logits: [T, V_local] bf16, fp16, fp32 or float64, any strides. See `inplace`.
        target_ids: [T] int64 or int32, global ids.
        topk_ids: [T, K] int32 or int64 global ids, -1 = absent. Duplicates, and a listed target, count once in the
            mass. None = no list; K = 0 is an empty list.
        vocab_size: valid columns in the whole vocabulary. Later columns are padding; they are ignored and get gradient
            exactly 0. None = all columns are valid.
        temperature: float, or [T]. Statistics describe softmax(logits / temperature). Not differentiable.
        group: tensor-parallel process group (gloo or NCCL); None = logits cover the whole vocabulary.
        entropy: "none" skips it, "metric" returns it without gradient, "differentiable" with gradient.
        backend: "torch", "triton", or "auto": Triton for CUDA tensors where it is installed, else torch.
        sampling_mask_ids: [N] int32 or int64 global ids, the concatenated sampling masks of all rows: the tokens that
            top-p, top-k and min-p left to sample the target from. Statistics of such a row describe the renormalized
            softmax over the mask, and the logits outside get gradient 0. A target outside the mask raises; a top-K id
            outside counts as non-finite, so pass it as -1. With `inplace` the logits outside the masks become -inf in
            the forward pass; otherwise the logits are copied.
        sampling_mask_counts: [T] number of ids in each row; 0 = the row covers the whole vocabulary. None = all rows
            do. Masks {5, 7}, none and {2}: sampling_mask_ids [5, 7, 2], sampling_mask_counts [2, 0, 1].
        loss_mask: [T] bool. Rows where it is False have 0 in every statistic, send no gradient, and may have any
            target, -100 too, and any temperature. None = all rows.
        vocab_start: first global id of this rank's shard, for shards of different sizes.
        tiles: sum the vocabulary, padding included, in this many tiles of equal width, merge the tiles in order, and
            gather a row of sums per tile. Statistics and gradients then have the same bits at every group size that
            divides `tiles`. None = each shard is a tile.
        inplace: True = the backward pass writes the gradient into the logits' storage, so it allocates no memory of
            that size. False = it allocates. None = True unless the logits are a leaf or a view of a leaf, because the
            caller expects to keep a leaf's values. Without sampling masks, the logits keep their values until the
            backward pass in every case.
        check: verify ids, temperatures and that the ranks agree. Costs small reductions and, on CUDA, a device
            synchronization: per call or, with a DeferredChecks, once for all calls before its `raise_if_failed`.
            False: no checks.

    Math: for A the top K and the target, dz_j = [1{j in A} g_j - pi_j (sum g + h (ln pi_j + H))] / temperature with
    g = dL/d ln pi and h = dL/dH. Each rank sends max, sum and entropy sum over the columns outside A in its shard, and
    the logits in A (log-sum-exp merging, as in Milakov and Gimelshein, 2018, "Online normalizer calculation").

    Raises:
        TypeError, ValueError: wrong types, dtypes, shapes, devices or options; ids out of range; shards that do not
            add up to vocab_size; ranks that disagree. The message has names and sizes. All ranks raise if they pass
            equal arguments.
        Non-finite logits do not raise: see TokenStatistics.nonfinite.
    """
    checks.check_floating("logits", logits, 2, "[T, V_local]")
    tokens, columns = logits.shape
    request = Request.build(
        logits,
        tokens,
        make_shard(columns, vocab_size, vocab_start, group, tiles),
        target_ids=target_ids,
        topk_ids=topk_ids,
        temperature=temperature,
        entropy=entropy,
        backend=backend,
        sampling_mask_ids=sampling_mask_ids,
        sampling_mask_counts=sampling_mask_counts,
        loss_mask=loss_mask,
        check=check,
    )
    if loss_mask is not None:
        request = request.cleaned(loss_mask)
    if inplace is None:
        base = logits._base
        inplace = not (logits.is_leaf or (base is not None and base.is_leaf))
    outputs = _Stored.apply(logits, request, inplace)
    if loss_mask is not None:
        outputs = tuple(None if output is None else _masked(output, loss_mask) for output in outputs)
    return TokenStatistics(*outputs)


def _masked(output: Tensor, loss_mask: Tensor) -> Tensor:
    return output.masked_fill(~(loss_mask if output.dim() == 1 else loss_mask[:, None]), 0)


def _writable(logits: Tensor) -> bool:
    """Return whether no two elements of logits share memory, and this memory may be written here."""
    overlapping = any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True))
    return not overlapping and (not logits.is_inference() or torch.is_inference_mode_enabled())


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, request: Request, inplace: bool) -> tuple[Tensor | None, ...]:
        shard = request.shard
        ctx.inplace = inplace and _writable(logits)
        # `.data` does not change autograd's version counter: the bits are restored before the call returns.
        z = logits.data if _writable(logits) else logits.clone()
        copied = request.masks is not None and not ctx.inplace
        if request.masks is not None:  # hidden logits are not restored: change the counter, or hide them in a copy
            z = logits.clone() if copied else logits.detach()
            if shard.valid:
                request.masks.hide_others(z[:, : shard.valid], shard.first)

        def fill(ids: Tensor, out: Tensor) -> None:
            for rows, columns in zip(out, shard.valid_tiles(), strict=True):
                if columns.start < columns.stop:
                    request.backend.forward(
                        z[:, columns],
                        ids,
                        shard.first + columns.start,
                        request.scale,
                        rows,
                        entropy=request.entropy != "none",
                        restore=True,
                        large=shard.compiles(columns.stop - columns.start),
                    )
                else:
                    empty_rows(rows)

        ctx.save_for_backward(z if copied else logits)
        return request.forward(ctx, fill)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        request, shard = ctx.request, ctx.request.shard
        coefficients = request.coefficients(ctx, grads)
        (logits,) = ctx.saved_tensors
        # `detach` changes the version counter, unlike `.data`, so a second use of the consumed logits raises an error.
        gradient = logits.detach() if ctx.inplace else logits.detach().clone()
        for columns in shard.valid_tiles():
            if columns.start < columns.stop:
                request.backend.backward(
                    gradient[:, columns],
                    ctx.ids,
                    shard.first + columns.start,
                    request.scale,
                    coefficients,
                    large=shard.compiles(columns.stop - columns.start),
                )
        gradient[:, shard.valid :] = 0
        return gradient, None, None
