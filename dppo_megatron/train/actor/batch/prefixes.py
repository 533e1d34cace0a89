"""Computes a prompt once for all sequences in a micro-batch that share the prompt.

All samples of a prompt share the prompt's hidden states, keys and values. So the prompt rows are computed once and
collect the gradients of all samples. The rows of each sample follow, at their positions in the sequence. In attention
(`actor.local.attention`) sample rows see the keys of the prompt and of the sample. The model output equals the output
for whole sequences: the last prompt row predicts the first token of every sample, and is read once for each sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclass(frozen=True)
class SharedRows:
    """Describes the R rows that are computed for a batch of T tokens: S segments end to end, on the CPU.

    A segment is a whole sequence, a prefix, or the part of a sequence after its prefix. Example: prompt [p q] with
    samples [a b] and [c], so cu_seqlens [0, 4, 7] and shared_prefix [0, 2]:

        token   0 1 2 3 | 4 5 6       computed row   0 1 | 2 3 | 4
                p q a b | p q c                      p q | a b | c

    bounds [0, 2, 4, 5]; prefixes [[0, 0], [0, 2], [0, 2]]: both samples continue the 2 rows from row 0;
    origin [0, 1, 2, 3, 6]; row [0, 1, 2, 3, 0, 1, 4].
    """

    bounds: Int[Tensor, " S+1"]
    prefixes: Int[Tensor, "S 2"]  # first row and number of rows that a segment continues; 0 rows = none
    origin: Int[Tensor, " R"]  # token of each row
    row: Int[Tensor, " T"]  # computed row of each token


def shared_rows(cu_seqlens: Int[Tensor, " B+1"], shared_prefix: Int[Tensor, " B"]) -> SharedRows:
    """Return the rows to compute if sequences share prefixes as `TokenBatch.shared_prefix` describes.

    Raises ValueError if sequences with the same prompt disagree on the prompt length.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff()
    shared = shared_prefix.long()
    continues = shared > 0
    begins = torch.arange(len(shared))
    begins = torch.where(continues, 0, begins).cummax(0).values  # for each sequence the first with the same prompt
    next_shared = F.pad(shared[1:], (0, 1))
    prefix = torch.where(continues, shared, next_shared)
    if bool(continues[:1].any()) or bool((prefix != prefix[begins]).any()) or bool((prefix > lengths).any()):
        raise ValueError(f"shared_prefix {shared.tolist()} contradicts sequences of {lengths.tolist()} tokens")
    # Each sequence has two segments: the prefix, empty if an earlier sequence computes it, and the other rows.
    suffix = lengths - prefix
    sizes = torch.stack((torch.where(continues, 0, prefix), suffix), dim=1).flatten()
    sources = torch.stack((starts, starts + prefix), dim=1).flatten()
    ends = sizes.cumsum(0)
    first = ends - sizes
    origin = torch.arange(int(ends[-1])) + (sources - first).repeat_interleave(sizes)

    column = torch.arange(int(cu_seqlens[-1])) - starts.repeat_interleave(lengths)
    in_prefix = column < prefix.repeat_interleave(lengths)
    to_prefix, to_suffix = first[2 * begins], first[1::2] - prefix
    row = column + torch.where(in_prefix, to_prefix.repeat_interleave(lengths), to_suffix.repeat_interleave(lengths))

    none = torch.zeros(len(shared), 2, dtype=torch.long)
    prefixes = torch.stack((none, torch.stack((to_prefix, prefix), dim=1)), dim=1).flatten(0, 1)
    nonempty = sizes > 0
    return SharedRows(F.pad(ends[nonempty], (1, 0)), prefixes[nonempty], origin, row)
