"""Divides packed rows among context-parallel ranks, and exchanges rows between them.

Every sequence is padded to a multiple of 2 x ranks and split into 2 x ranks equal chunks. Rank r has chunk r from the
start and chunk r from the end, so that causal attention costs every rank the same. Example with 2 ranks and 8 tokens:
rank 0 has tokens 0, 1, 6, 7 and rank 1 has 2 to 5. TransformerEngine uses the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dppo_megatron.vocab_parallel.collectives import gather_sequence

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def rows_of_rank(cu_seqlens: Int[Tensor, " B+1"], rank: int, size: int) -> Int[Tensor, " T/size"]:
    """Return the packed rows of context-parallel rank `rank` among `size` ranks, ascending.

    Raises ValueError unless all lengths are multiples of 2 x size.
    """
    lengths = cu_seqlens.long().diff()
    if bool((lengths % (2 * size)).any()):
        raise ValueError(f"context parallelism needs lengths that {2 * size} divides, got {lengths.tolist()}")
    chunk_of_row = (
        torch.arange(2 * size)
        .repeat(len(lengths))
        .repeat_interleave((lengths // (2 * size)).repeat_interleave(2 * size))
    )
    return ((chunk_of_row == rank) | (chunk_of_row == 2 * size - 1 - rank)).nonzero().flatten()


def gathered_places(cu_seqlens: Int[Tensor, " B+1"], size: int) -> Int[Tensor, " T"]:
    """Return the index of each packed row after the rows of all ranks are concatenated in rank order.

    Example: one sequence of 4 rows on 2 ranks, rows [0, 3] and [1, 2], has the indices [0, 2, 3, 1].
    """
    places = torch.empty(int(cu_seqlens[-1]), dtype=torch.long)
    places[torch.cat([rows_of_rank(cu_seqlens, rank, size) for rank in range(size)])] = torch.arange(len(places))
    return places


def gather_unequal_rows(x: Float[Tensor, "n ..."], counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Concatenate the rows of all ranks, counts[r] from rank r. The backward pass sums row gradients over the ranks.

    The exchange pads to the largest count.
    """
    longest = max(counts)
    missing = x.new_zeros(longest - x.shape[0], *x.shape[1:])
    parts = gather_sequence(torch.cat((x, missing)), group).split(longest)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
