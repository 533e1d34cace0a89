"""Sequences of one micro-batch that begin alike compute their beginning once.

The samples of a group have one prompt: its hidden states, keys and values are the same for all of them, and so its
rows are computed once, its gradients those of all samples together. Each sample's own rows go on behind them, at the
positions that they have in their sequence; attention (`cpu.attention`) lets them see the prompt's keys and their own.
What leaves the model is as if each sequence had been computed whole: the row that predicts a sample's first token is
the prompt's last, read once for each sample.
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
    """The R rows that are computed of a batch of T tokens: S segments end to end, on the CPU.

    A segment is a sequence by itself, a prefix, or what follows a prefix in one sequence.
    """

    bounds: Int[Tensor, " S+1"]
    prefixes: Int[Tensor, "S 2"]  # first row and number of rows that a segment continues; 0 rows = it begins
    origin: Int[Tensor, " R"]  # token of each row
    row: Int[Tensor, " T"]  # of each token


def shared_rows(cu_seqlens: Int[Tensor, " B+1"], shared_prefix: Int[Tensor, " B"]) -> SharedRows:
    """shared_prefix: see `TokenBatch`. Raises ValueError where sequences with one beginning do not agree on it."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff()
    shared = shared_prefix.long()
    continues = shared > 0
    begins = torch.arange(len(shared))
    begins = torch.where(continues, 0, begins).cummax(0).values  # the first sequence of each one's run
    after = F.pad(shared[1:], (0, 1))
    prefix = torch.where(continues, shared, after)
    if bool(continues[:1].any()) or bool((prefix != prefix[begins]).any()) or bool((prefix > lengths).any()):
        raise ValueError(f"sequences of {lengths.tolist()} tokens cannot share prefixes of {shared.tolist()}")
    # Two segments a sequence: a prefix, which is empty but for a run's first, and its own rows.
    own = lengths - prefix
    sizes = torch.stack((torch.where(continues, 0, prefix), own), dim=1).flatten()
    sources = torch.stack((starts, starts + prefix), dim=1).flatten()
    ends = sizes.cumsum(0)
    first = ends - sizes
    origin = torch.arange(int(ends[-1])) + (sources - first).repeat_interleave(sizes)

    column = torch.arange(int(cu_seqlens[-1])) - starts.repeat_interleave(lengths)
    in_prefix = column < prefix.repeat_interleave(lengths)
    to_prefix, to_own = first[2 * begins], first[1::2] - prefix
    row = column + torch.where(in_prefix, *(x.repeat_interleave(lengths) for x in (to_prefix, to_own)))

    none = torch.zeros(len(shared), 2, dtype=torch.long)
    prefixes = torch.stack((none, torch.stack((to_prefix, prefix), dim=1)), dim=1).flatten(0, 1)
    held = sizes > 0
    return SharedRows(F.pad(ends[held], (1, 0)), prefixes[held], origin, row)
