"""Represents sampling masks, which restrict a row's distribution to some vocabulary ids.

Top-p, top-k and min-p keep a set of tokens to draw from. The log-probs of drawn tokens are renormalized over that set,
and the policy's log-probs must be too: the other logits count as -inf and get gradient 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingMasks:
    """Contains the concatenated sampling masks of T rows. A row without ids covers the whole vocabulary.

    Example: three rows with the masks {4, 1, 6}, none and {0, 5} have ids [4, 1, 6, 0, 5], rows [0, 0, 0, 2, 2] and
    restricted [True, False, True].

    ids: [N] int64, global.
    rows: [N] int64, the row of each id.
    restricted: [T] bool, True for rows with a mask.
    total: [] sum of the counts; -1 if a count is negative.
    """

    ids: Tensor
    rows: Tensor
    restricted: Tensor
    total: Tensor

    @classmethod
    def from_ids(cls, ids: Tensor, counts: Tensor) -> SamplingMasks:
        """Build the masks from ids [N] and each row's number of ids, counts [T]. No synchronization.

        Counts that do not add up to N assign ids to wrong rows, but never to rows that do not exist.
        """
        counts = counts.long()
        places = torch.arange(len(ids), device=counts.device)
        rows = torch.searchsorted(counts.cumsum(0), places, right=True).clamp_(max=len(counts) - 1)
        return cls(ids.long(), rows, counts > 0, torch.where((counts < 0).any(), -1, counts.sum()))

    def select(self, rows: Tensor) -> SamplingMasks:
        """Return the masks for the `rows` [n], ascending. Synchronizes with the device."""
        place = torch.full_like(self.restricted, -1, dtype=torch.long)
        place[rows] = torch.arange(len(rows), device=place.device)
        selected = (place[self.rows] >= 0).nonzero().flatten()
        ids = self.ids[selected]
        total = torch.where(self.total < 0, self.total, self.total - len(self.ids) + len(ids))
        return SamplingMasks(ids, place[self.rows[selected]], self.restricted[rows], total)

    def missing(self, target_ids: Tensor) -> Tensor:
        """Return [T] bool: True if the row is restricted and the mask lacks the target."""
        num_matches = torch.zeros_like(target_ids, dtype=torch.int32)
        num_matches.index_add_(0, self.rows, (self.ids == target_ids[self.rows]).int())
        return self.restricted & (num_matches == 0)

    def hide_others(self, block: Tensor, first: int) -> None:
        """Set logits outside the masks to -inf, in place. block: [T, columns > 0] of columns [first, first + columns).

        Example: columns 4 to 7, first = 4, and the masks {4, 1, 6}, none and {0, 5} from the class example:

            logits            after
            a b c d           a    -inf c    -inf     columns 4 and 6 are in the mask; id 1 is in another block
            e f g h           e    f    g    h        a row without a mask
            i j k l           -inf j    -inf -inf

        Each id writes one column. An id from another block writes the final value of column 0 in the row, here `a` for
        id 1 and -inf for id 0. So the number of writes is fixed, and the host needs no count from the device.
        """
        local = self.ids - first
        inside = (local >= 0) & (local < block.shape[1])
        column = torch.where(inside, local, 0)
        at_front = torch.zeros_like(self.restricted, dtype=torch.int32).index_add_(0, self.rows, (local == 0).int())
        hidden = float("-inf")
        front = block[:, 0].masked_fill(self.restricted & (at_front == 0), hidden)
        values = torch.where(inside, block[self.rows, column], front[self.rows])
        block.masked_fill_(self.restricted.unsqueeze(1), hidden)
        block.index_put_((self.rows, column), values)
