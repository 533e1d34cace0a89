"""Context parallelism: which rows of a packed batch a rank has, and the exchange with those of the others.

Every sequence is padded to a multiple of 2 x ranks and split into as many equal chunks; rank r has chunk r and its
mirror image, so that causal attention costs every rank the same. This is TransformerEngine's order too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def rows_of_rank(cu_seqlens: Int[Tensor, " B+1"], rank: int, size: int) -> Int[Tensor, " T/size"]:
    """Ascending packed rows that context-parallel rank `rank` of `size` has; lengths are multiples of 2 x size."""
    lengths = cu_seqlens.long().diff()
    if bool((lengths % (2 * size)).any()):
        raise ValueError(f"sequences of {lengths.tolist()} tokens: not all multiples of {2 * size}")
    chunk_of_row = (
        torch.arange(2 * size)
        .repeat(len(lengths))
        .repeat_interleave((lengths // (2 * size)).repeat_interleave(2 * size))
    )
    return ((chunk_of_row == rank) | (chunk_of_row == 2 * size - 1 - rank)).nonzero().flatten()


def gathered_places(cu_seqlens: Int[Tensor, " B+1"], size: int) -> Int[Tensor, " T"]:
    """Where each packed row lies when the rows of all ranks stand end to end, in rank order."""
    places = torch.empty(int(cu_seqlens[-1]), dtype=torch.long)
    places[torch.cat([rows_of_rank(cu_seqlens, rank, size) for rank in range(size)])] = torch.arange(len(places))
    return places


def gather_rows(x: Float[Tensor, "T ..."], group: dist.ProcessGroup) -> Float[Tensor, "size*T ..."]:
    """Rows of all ranks end to end, equally many from each. The gradient of a row is summed over the ranks."""
    return _GatherRows.apply(x, group)


def gather_unequal_rows(x: Float[Tensor, "n ..."], counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """`gather_rows` where rank r holds counts[r] rows."""
    longest = max(counts)
    missing = x.new_zeros(longest - x.shape[0], *x.shape[1:])
    parts = gather_rows(torch.cat((x, missing)), group).split(longest)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


class _GatherRows(torch.autograd.Function):
    """Forward one all-gather, backward one reduce-scatter."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        size = ctx.group.size()
        own = grad.new_empty(grad.shape[0] // size, *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None
