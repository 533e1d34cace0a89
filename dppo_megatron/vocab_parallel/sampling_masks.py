"""Sampling masks: rows whose probabilities are over some ids of the vocabulary alone.

Top-p, top-k and min-p leave a set of tokens to draw from. The log-probs of what was drawn are renormalised over that
set, and so must be those that they are compared with: the other logits count as -inf and get gradient 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingMasks:
    """The sets of T rows end to end. A row that keeps nothing is not restricted.

    ids: [N] int64, global. rows: [N] int64, the row of each. has_mask: [T] bool. total: [] ids by the counts; -1: one
    of these is negative.
    """

    ids: Tensor
    rows: Tensor
    has_mask: Tensor
    total: Tensor

    @classmethod
    def of(cls, sampling_mask_ids: Tensor, sampling_mask_counts: Tensor, loss_mask: Tensor | None) -> SamplingMasks:
        """sampling_mask_ids [N], sampling_mask_counts [T] of them in each row. Rows without loss are not restricted.
        No synchronisation: counts that do not add up to N give wrong rows, never rows that do not exist."""
        counts = sampling_mask_counts.long()
        places = torch.arange(len(sampling_mask_ids), device=counts.device)
        rows = torch.searchsorted(counts.cumsum(0), places, right=True).clamp_(max=len(counts) - 1)
        has_mask = counts > 0 if loss_mask is None else (counts > 0) & loss_mask
        return cls(sampling_mask_ids.long(), rows, has_mask, torch.where((counts < 0).any(), -1, counts.sum()))

    def select(self, chosen: Tensor) -> SamplingMasks:
        """Of the rows [n] `chosen`, ascending. Synchronises with the device."""
        place = torch.full_like(self.has_mask, -1, dtype=torch.long)
        place[chosen] = torch.arange(len(chosen), device=place.device)
        own = (place[self.rows] >= 0).nonzero().flatten()
        ids = self.ids[own]
        total = torch.where(self.total < 0, self.total, self.total - len(self.ids) + len(ids))
        return SamplingMasks(ids, place[self.rows[own]], self.has_mask[chosen], total)

    def missing(self, target_ids: Tensor) -> Tensor:
        """[T] bool: restricted rows whose target is not in their set."""
        found = torch.zeros_like(target_ids, dtype=torch.int32)
        found.index_add_(0, self.rows, (self.ids == target_ids[self.rows]).int())
        return self.has_mask & (found == 0)

    def hide_others(self, block: Tensor, first: int) -> None:
        """Make the logits outside the sets -inf, in place. block: [T, columns > 0] of columns [first, first + columns).

        No synchronisation: an id of another block writes what column 0 of its row holds in the end anyway.
        """
        local = self.ids - first
        inside = (local >= 0) & (local < block.shape[1])
        column = torch.where(inside, local, 0)
        at_front = torch.zeros_like(self.has_mask, dtype=torch.int32).index_add_(0, self.rows, (local == 0).int())
        lost = float("-inf")
        front = block[:, 0].masked_fill(self.has_mask & (at_front == 0), lost)
        values = torch.where(inside, block[self.rows, column], front[self.rows])
        block.masked_fill_(self.has_mask.unsqueeze(1), lost)
        block.index_put_((self.rows, column), values)
