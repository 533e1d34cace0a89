"""Which packed rows lie side by side when attention is computed: made once for a micro-batch, not once for a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dppo_megatron.actor.batch.context import gathered_places, rows_of_rank

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

_SHORT = 32  # segments up to here share one group: padding them costs less than another call
_FILL = 0.7  # a longer group admits segments of at least this share of its longest


@dataclass(frozen=True)
class SegmentPlan:
    """Where each packed row lies in the padded layout, and back.

    `groups` are (segments n, padded queries Q, padded keys L) in order; together they have N = sum(n Q) padded
    rows. A segment is a sequence, or what is computed of it here. Where it is the whole, Q = L and keys lie where
    queries do; where any is not, `keys` says where all of them lie.
    """

    groups: tuple[tuple[int, int, int], ...]
    pad_rows: Int[Tensor, " N"]  # packed row at each padded place; behind its end a segment repeats its last
    packed_rows: Int[Tensor, " T"]  # padded place of each packed row
    keys: SegmentKeys | None = None

    def to(self, device: torch.device) -> SegmentPlan:
        keys = None if self.keys is None else self.keys.to(device)
        return replace(self, pad_rows=self.pad_rows.to(device), packed_rows=self.packed_rows.to(device), keys=keys)


@dataclass(frozen=True)
class SegmentKeys:
    """Keys and values at M' padded places, made of M rows: this rank's or all context-parallel ranks'."""

    pad_rows: Int[Tensor, " M'"]  # row at each padded place
    positions: Int[Tensor, " N"]  # position in its sequence of each padded query: it sees the keys up to there
    places: Int[Tensor, " K"]  # padded places that hold a key
    rows: Int[Tensor, " K"] | None = None  # which row it is; None: K = M, and places are those of the rows in order

    def to(self, device: torch.device) -> SegmentKeys:
        rows = None if self.rows is None else self.rows.to(device)
        return SegmentKeys(self.pad_rows.to(device), self.positions.to(device), self.places.to(device), rows)


def plan_segments(
    bounds: Int[Tensor, " S+1"],
    prefixes: Int[Tensor, "S 2"] | None = None,
    context_rank: int = 0,
    context_size: int = 1,
) -> SegmentPlan:
    """Group the segments bounded by `bounds` (first 0, last T) by length. All tensors are on the CPU.

    prefixes: first row and number of the rows that a segment continues: it sees their keys, then its own. 0 rows, or
    None: it is a whole sequence. With context parallelism, which cannot have prefixes, `bounds` are those of whole
    sequences, of which this rank holds `context.rows_of_rank`. Raises ValueError for an empty segment.
    """
    starts, own = bounds[:-1].long(), bounds.long().diff()
    if bool((own <= 0).any()):
        raise ValueError("packed sequences must not be empty")
    if prefixes is None:
        prefixes = torch.zeros(len(own), 2, dtype=torch.long)
    before = prefixes[:, 1]
    order, counts = _by_length(own + before, before > 0)
    starts, own, before, prefixes = starts[order], own[order], before[order], prefixes[order]
    keys = _side_by_side(starts, own + before, counts, prefixes)
    if context_size > 1:
        queries = _side_by_side(starts // context_size, own // context_size, counts)
        mine = rows_of_rank(bounds, context_rank, context_size)
        in_sequence = mine - bounds[:-1].long().repeat_interleave(bounds.long().diff())[mine]
        gathered = gathered_places(bounds, context_size)
        places = torch.empty(len(gathered), dtype=torch.long)
        places[gathered] = keys.places()
        of_keys = SegmentKeys(gathered[keys.rows], in_sequence[queries.rows], places)
    elif bool(before.any()):
        queries = _side_by_side(starts, own, counts)
        held = keys.real.nonzero().flatten()
        of_keys = SegmentKeys(keys.rows, queries.columns + before[queries.segments], held, keys.rows[held])
    else:
        queries, of_keys = keys, None
    groups = tuple(zip(counts, queries.longest, keys.longest, strict=True))
    return SegmentPlan(groups, queries.rows, queries.places(), of_keys)


@dataclass(frozen=True)
class _Padded:
    """Segments one under the other, each group padded to its longest: N places."""

    longest: list[int]  # of each group
    rows: Int[Tensor, " N"]  # packed row; behind its end a segment repeats its last
    columns: Int[Tensor, " N"]  # of its segment, as far as it goes
    segments: Int[Tensor, " N"]
    real: Bool[Tensor, " N"]  # not padding

    def places(self) -> Int[Tensor, " T"]:
        """Of each row, where every row has one."""
        held = self.real.nonzero().flatten()
        return torch.empty_like(held).index_copy_(0, self.rows[held], held)


def _side_by_side(starts: Tensor, lengths: Tensor, counts: Sequence[int], prefixes: Tensor | None = None) -> _Padded:
    """Segments of `lengths`, `counts` of them in each group; prefixes [S, 2] are their first rows, else `starts`."""
    parts, first = [], 0
    for count in counts:
        group = torch.arange(first, first + count)[:, None]
        size = lengths[group]
        column = torch.arange(int(size.max()))[None]
        columns = torch.minimum(column, size - 1)
        rows = starts[group] + columns
        if prefixes is not None:
            begin, before = prefixes[first : first + count].split(1, dim=1)
            rows = torch.where(columns < before, begin + columns, rows - before)
        parts.append((rows, columns, group.expand_as(rows), column < size))
        first += count
    longest = [rows.shape[1] for rows, *_ in parts]
    return _Padded(longest, *(torch.cat([x.flatten() for x in of_all]) for of_all in zip(*parts, strict=True)))


def _by_length(lengths: Int[Tensor, " S"], continuing: Bool[Tensor, " S"]) -> tuple[Tensor, list[int]]:
    """(order of the segments, longest first, how many of them go side by side each time); no group mixes those that
    continue others and those that do not."""
    order, counts = [], []
    for chosen in (~continuing, continuing):
        indices = chosen.nonzero().flatten()
        descending, by_length = torch.sort(lengths[indices], descending=True, stable=True)
        order.append(indices[by_length])
        counts += _group_sizes(descending)
    return torch.cat(order), counts


def _group_sizes(lengths: Int[Tensor, " S"]) -> list[int]:
    """How many of the segments, longest first, go side by side each time."""
    counts, first = [], 0
    while first < len(lengths):
        longest = int(lengths[first])
        admitted = 1 if longest <= _SHORT else max(1, int(longest * _FILL))
        counts.append(int((lengths[first:] >= admitted).sum()))
        first += counts[-1]
    return counts
