"""Finds the ids in each row (the target, then the top K) and the block columns that they name.

A slot is a position in [T, n], n = 1 + K. Two slots may name the same id, and a slot may be absent (-1). Example: the
target 7 with the list [2, 7, -1] has ids [7, 2, 7, -1], counted [1, 1, 0, 0] and twin [0, 1, 0, 3].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_PAIRS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Slots:
    """Describes the slots of T rows. All fields are [T, n].

    present: ids >= 0.
    counted: the slot is present and the first with this id, so that each distinct id counts once.
    twin: the first slot with the same id.
    """

    present: Tensor
    counted: Tensor
    twin: Tensor

    def sum_over_twins(self, values: Tensor) -> Tensor:
        """Return [T, n]: for each slot, the sum of values [T, n] over the slots that name the same id."""
        return torch.zeros_like(values).scatter_add_(1, self.twin, values).gather(1, self.twin)


def join_ids(target_ids: Tensor, topk_ids: Tensor | None) -> Tensor:
    """Return [T, n] int64: the target, then the top K."""
    ids = target_ids.long().unsqueeze(1)
    if topk_ids is not None and topk_ids.shape[1]:
        ids = torch.cat((ids, topk_ids.long()), dim=1)
    return ids


def find_slots(ids: Tensor) -> Slots:
    """Find the slots in ids [T, n] that name the same id."""
    present = ids >= 0
    n = ids.shape[1]
    twin = torch.empty_like(ids)
    rows = max(1, _PAIRS_AT_ONCE // (n * n))
    for r in range(0, ids.shape[0], rows):
        block = ids[r : r + rows]
        equal = block.unsqueeze(2) == block.unsqueeze(1)
        torch.argmax(equal.view(torch.uint8), dim=2, out=twin[r : r + rows])
    counted = (twin == torch.arange(n, device=ids.device)).logical_and_(present)
    return Slots(present, counted, twin)


def _scatter(block: Tensor, column: Tensor, values: Tensor) -> None:
    if block.element_size() == 2:
        # On the CPU a 16-bit float scatter_ converts and copies the whole block; an integer scatter_ of these bits does
        # not.
        block, values = block.view(torch.int16), values.view(torch.int16)
    block.scatter_(1, column, values)


@dataclass(frozen=True)
class LocalSlots:
    """Describes the slots with a column in a block.

    inside: [T, n], whether the slot's column is in the block.
    column: [T, n], within the block. A slot outside repeats the column of an inside slot in the row, or column 0 if all
        are outside, so that scatters need no data-dependent shapes (no device sync).
    source: [T, n], the slot with the value that belongs at `column`.
    any_inside: [T, 1].

    Example: the ids [7, 2, 9] in the block of columns 0 to 4 (first = 0) have inside [0, 1, 0], column [2, 2, 2] and
    source [1, 1, 1].
    """

    inside: Tensor
    column: Tensor
    source: Tensor
    any_inside: Tensor

    def put(self, block: Tensor, values: Tensor) -> None:
        """Write values[t, slot] to the slot's column in block [T, columns], in place."""
        values = values.gather(1, self.source)
        old_values = block.gather(1, self.column)
        _scatter(block, self.column, torch.where(self.any_inside, values.to(block.dtype), old_values))

    def hide(self, block: Tensor) -> Tensor:
        """Set the slots' columns in block to -inf, in place. Return the old logits, for `show` to restore."""
        hidden = block.gather(1, self.column)
        _scatter(block, self.column, hidden.masked_fill(self.any_inside, float("-inf")))
        return hidden

    def show(self, block: Tensor, hidden: Tensor) -> None:
        """Restore the logits that `hide` returned."""
        _scatter(block, self.column, hidden)


def local_slots(ids: Tensor, first: int, columns: int) -> LocalSlots:
    """Find the slots in ids [T, n] (global) within the block [first, first + columns), columns > 0."""
    local = ids - first
    inside = (local >= 0) & (local < columns)
    any_inside = inside.any(dim=1, keepdim=True)
    home = inside.view(torch.uint8).argmax(dim=1, keepdim=True)
    source = torch.where(inside, torch.arange(ids.shape[1], device=ids.device), home)
    column = local.gather(1, source).masked_fill_(~any_inside, 0)
    return LocalSlots(inside, column, source, any_inside)
