"""Plans the chunks of packed sequences in which `local.delta_rule` computes its states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int

CHUNK = 64  # rows; a larger chunk needs fewer steps and more work per row


@dataclass(frozen=True)
class ChunkPlan:
    """Maps T packed rows to positions in chunks, in the order of steps. Built once per micro-batch.

    Example with chunks of 4: sequences of 3 and 6 rows have 1 and 2 chunks, so `steps` is (2, 1). Positions 0 to 3 are
    rows 3 to 6, from the longer sequence. Positions 4 to 6 are rows 0 to 2, the shorter sequence. Positions 8 and 9 are
    rows 7 and 8. All others are padding.
    """

    steps: tuple[int, ...]  # number of sequences with a chunk at each step; sequences with more chunks come first
    rows: Int[Tensor, " N"]  # packed row at each position, T at padding
    places: Int[Tensor, " T"]  # position of each packed row
    columns: Int[Tensor, "T 1"]  # index of each packed row within its sequence

    def to(self, device: torch.device) -> ChunkPlan:
        return ChunkPlan(self.steps, self.rows.to(device), self.places.to(device), self.columns.to(device))


def plan_chunks(bounds: Int[Tensor, " S+1"], chunk: int = CHUNK) -> ChunkPlan:
    """Plan the chunks for the sequences between `bounds` (first 0, last T), on the CPU."""
    lengths = bounds.long().diff()
    counts = -(-lengths // chunk)
    order = torch.sort(counts, descending=True, stable=True).indices
    number = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
    steps = [int((counts > step).sum()) for step in range(int(counts.max()))]
    first = F.pad(torch.tensor(steps).cumsum(0), (1, 0))
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    columns = torch.arange(int(bounds[-1])) - bounds[:-1].long()[sequence]
    places = (first[columns // chunk] + number[sequence]) * chunk + columns % chunk
    rows = torch.full((int(first[-1]) * chunk,), len(places)).index_copy_(0, places, torch.arange(len(places)))
    return ChunkPlan(tuple(steps), rows, places, columns[:, None])
