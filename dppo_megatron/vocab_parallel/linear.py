"""Defines linear_token_statistics: statistics from hidden states and the head's weight, without stored logits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from . import checks
from .batch_invariant import invariant_mm
from .checks import DeferredChecks
from .collectives import gather_sequence, reduce_gradient
from .merge import add_rows, empty_rows
from .request import Request
from .sampling_mask import SamplingMasks
from .shard import Shard, make_shard
from .statistics import TokenStatistics

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def linear_token_statistics(
    hidden: Float[Tensor, "T H"],
    weight: Float[Tensor, "V_local H"],
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
    bias: Float[Tensor, " V_local"] | None = None,
    loss_mask: Bool[Tensor, " T"] | None = None,
    sequence_parallel: bool = False,
    vocab_start: int | None = None,
    tiles: int | None = None,
    block_columns: int | None = None,
    batch_invariant: bool = False,
    check: bool | DeferredChecks = True,
) -> TokenStatistics:
    """Return token_statistics of hidden @ weight.T + bias, computed one vocabulary block at a time.

    This costs a fourth GEMM, because the backward pass projects again. It saves the memory for the logits and their
    gradient, because only [T, block_columns] values exist at once.

    Sharding: weight and bias are split over `group` by vocabulary rows as in token_statistics. hidden is replicated, or
    with sequence_parallel split along T (rank r has rows [r T/W, (r + 1) T/W)). target_ids, topk_ids, temperature,
    loss_mask and the results cover all T tokens and are replicated.
    Collectives: the forward pass runs the token_statistics all-gather, and with sequence_parallel an all-gather of
    hidden. The backward pass reduces the hidden gradient, as every column-parallel head does (all-reduce, or
    reduce-scatter with sequence_parallel). The hidden gradient is complete on return, so do not reduce it again.
    dtypes: hidden, weight and logits have the same dtype, as in a head that stores logits. Sums over the vocabulary are
    in fp32, and the hidden gradient is summed over blocks in fp32. The sum is then rounded to hidden's dtype and
    reduced over ranks. Weight and bias gradients are computed per block, without accumulation across blocks. float64
    stays float64.

    Args that token_statistics lacks or treats differently:
        hidden: [T, H], or [T/W, H] with sequence_parallel.
        weight: [V_local, H]. Pass a tied embedding as it is; autograd adds its two gradients.
        bias: [V_local] or None.
        loss_mask: [T] bool. Only tokens where it is True are projected; the others have 0 in every statistic and send
            no gradient. Costs a device synchronization, and another with sampling masks. None = all tokens.
        tiles: as in token_statistics, if hidden and weight have the same bits at every group size. The hidden gradient
            is an exception, because ranks round and add their parts.
        block_columns: columns projected at once, +- 63. None = a sixteenth of the shard (with `tiles`, of the tile), at
            least 1024.
        batch_invariant: a row's statistics and hidden gradient have the same bits in every batch. The products take a
            fixed number of rows, padded with zeros. Ranks sum the hidden gradient in rank order, by an all-to-all (and
            an all-gather, unless sequence_parallel) instead of a ring. Weight and bias gradients are not covered,
            because they are sums over the rows.

    Math and errors: as in token_statistics.
    """
    checks.check_floating("hidden", hidden, 2, "[T, H]")
    checks.check_floating("weight", weight, 2, "[V_local, H]")
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {checks.shape(hidden)} and weight {checks.shape(weight)} differ in H: "
            f"{hidden.shape[1]} and {weight.shape[1]}"
        )
    if weight.dtype != hidden.dtype or weight.device != hidden.device:
        raise ValueError(
            f"weight ({weight.dtype}, {weight.device}) must match hidden ({hidden.dtype}, {hidden.device})"
        )
    columns = weight.shape[0]
    if bias is not None and (bias.shape != (columns,) or bias.dtype != weight.dtype):
        raise ValueError(
            f"bias must be [V_local] = [{columns}] in {weight.dtype}, got {checks.shape(bias)} in {bias.dtype}"
        )
    if block_columns is not None and block_columns < 1:
        raise ValueError(f"block_columns must be positive, got {block_columns}")
    shard = make_shard(columns, vocab_size, vocab_start, group, tiles)
    split = sequence_parallel and shard.group is not None
    tokens = hidden.shape[0] * (shard.world if split else 1)
    request = Request.build(
        hidden,
        tokens,
        shard,
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
    if split:
        hidden = gather_sequence(hidden, shard.group, in_order=batch_invariant)
    rows = None
    if loss_mask is not None:
        rows = loss_mask.nonzero().flatten()
        hidden, request = hidden.index_select(0, rows), request.select(rows)
    if shard.group is not None and not split:
        hidden = reduce_gradient(hidden, shard.group, in_order=batch_invariant)
    cuts = [_cut(tile, block_columns) for tile in shard.valid_tiles()]
    outputs = _Linear.apply(hidden, weight, bias, request, cuts, invariant_mm if batch_invariant else _mm)
    if rows is not None:
        outputs = tuple(None if output is None else _spread(output, rows, tokens) for output in outputs)
    return TokenStatistics(*outputs)


def _spread(output: Tensor, rows: Tensor, tokens: int) -> Tensor:
    return output.new_zeros((tokens, *output.shape[1:])).index_copy(0, rows, output)


def column_blocks(valid: int, at_most: int | None = None) -> list[slice]:
    """Divide a shard's columns [0, valid) into blocks of about equal width; at_most: block_columns.

    Unless blocks are narrow, they begin at multiples of 64. A GPU's matrix product needs aligned rows, which equal
    parts of an odd vocabulary (50257, 32064) lack. Example: 100 columns, at most 40 at once, are divided at 33 and 66.
    """
    at_most = at_most or max(1024, -(-valid // 16))
    count = -(-valid // at_most)
    unit = 64 if at_most >= 128 else 1
    cuts = [i * valid // count // unit * unit for i in range(count)]
    return [slice(*cut) for cut in pairwise([*cuts, valid])]


def _cut(tile: slice, at_most: int | None) -> list[slice]:
    """Return the `column_blocks` of one of the shard's tiles."""
    blocks = column_blocks(tile.stop - tile.start, at_most)
    return [slice(tile.start + block.start, tile.start + block.stop) for block in blocks]


def _mm(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)


def _large(shard: Shard, cuts: list[slice]) -> bool:
    """Return whether to compile the passes over a tile's blocks `cuts`."""
    return bool(cuts) and shard.compiles(cuts[-1].stop - cuts[0].start) and min(c.stop - c.start for c in cuts) > 1


def _project(
    product: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: slice,
    masks: SamplingMasks | None,
    first: int,
) -> Tensor:
    """Return the logits of `columns`, with -inf outside the sampling masks. first: the id of the first column."""
    with torch.autocast(hidden.device.type, enabled=False):
        block = product(hidden, weight[columns].t(), None if bias is None else bias[columns])
    if masks is not None:
        masks.hide_others(block, first)
    return block


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        request: Request,
        cuts: list[list[slice]],
        product: Callable[..., Tensor],
    ) -> tuple[Tensor | None, ...]:
        shard = request.shard

        def fill(ids: Tensor, out: Tensor) -> None:
            rows = torch.empty_like(out[0])
            for tile, blocks_of_tile in zip(out, cuts, strict=True):
                empty_rows(tile)
                large = _large(shard, blocks_of_tile)
                for columns in blocks_of_tile:
                    first = shard.first + columns.start
                    request.backend.forward(
                        _project(product, hidden, weight, bias, columns, request.masks, first),
                        ids,
                        first,
                        request.scale,
                        rows,
                        entropy=request.entropy != "none",
                        restore=False,
                        large=large,
                    )
                    add_rows(tile, rows, request.scale)

        ctx.save_for_backward(hidden, weight, bias)
        ctx.cuts, ctx.product = cuts, product
        return request.forward(ctx, fill)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        request, shard = ctx.request, ctx.request.shard
        coefficients = request.coefficients(ctx, grads)
        hidden, weight, bias = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = hidden.new_zeros(hidden.shape, dtype=request.dtype) if need_hidden else None
        d_weight = torch.zeros_like(weight) if need_weight else None
        d_bias = torch.zeros_like(bias) if need_bias else None
        for columns, large in ((columns, _large(shard, cuts)) for cuts in ctx.cuts for columns in cuts):
            first = shard.first + columns.start
            block = _project(ctx.product, hidden, weight, bias, columns, request.masks, first)
            request.backend.backward(block, ctx.ids, first, request.scale, coefficients, large=large)
            if d_weight is not None:
                torch.mm(block.t(), hidden, out=d_weight[columns])
            if d_bias is not None:
                d_bias[columns] = block.sum(dim=0, dtype=request.dtype)
            if d_hidden is not None:
                d_hidden += ctx.product(block, weight[columns])
        if d_hidden is not None:
            d_hidden = d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None
