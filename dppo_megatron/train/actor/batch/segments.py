"""Plans which packed rows are padded to a batch for attention. All layers share the plan of a micro-batch.

Example: a prompt of 3 rows and two samples of 2 rows and 1 row, packed as rows 0..2 | 3 4 | 5, so `bounds` are
[0, 3, 5, 6] and `prefixes` [[0, 0], [0, 3], [0, 3]]. The prompt is a group. The samples, which continue the prompt, are
a second group: 2 queries and 5 keys each, padded by repeating a segment's last row.

    group      queries (rows)     keys (rows)
    prompt     0 1 2              0 1 2            a whole sequence: queries and keys are the same rows
    samples    3 4                0 1 2 3 4        the prompt's keys, then the sample's
               5 5                0 1 2 5 5        the last column is padding

    groups ((1, 3, 3), (2, 2, 5)), pad_rows [0 1 2 3 4 5 5], packed_rows [0 1 2 3 4 5],
    keys.pad_rows [0 1 2 0 1 2 3 4 0 1 2 5 5], keys.positions [0 1 2 3 4 3 3]

A query sees the keys up to its position, so no query sees padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .context import gathered_places, rows_of_rank

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

_SHORT = 32  # segments up to this length share a group: padding costs less than another call
_FILL = 0.7  # groups of longer segments admit only segments of at least this share of the longest


@dataclass(frozen=True)
class SegmentPlan:
    """Maps each packed row to its index in the padded layout, and back.

    `groups` are (segments n, padded queries Q, padded keys L) in order, with N = sum(n Q) padded rows. A segment is a
    sequence, or the part of a sequence that is computed here. If all segments are whole sequences, queries and keys
    have equal indices, Q = L, and `keys` is None.
    """

    groups: tuple[tuple[int, int, int], ...]
    pad_rows: Int[Tensor, " N"]  # packed row of each padded row; a segment repeats its last row as padding
    packed_rows: Int[Tensor, " T"]  # padded index of each packed row
    keys: SegmentKeys | None = None

    def to(self, device: torch.device) -> SegmentPlan:
        keys = None if self.keys is None else self.keys.to(device)
        return replace(self, pad_rows=self.pad_rows.to(device), packed_rows=self.packed_rows.to(device), keys=keys)


@dataclass(frozen=True)
class SegmentKeys:
    """Maps keys and values of M rows, of this rank or all context-parallel ranks, to M' padded rows."""

    pad_rows: Int[Tensor, " M'"]  # row of each padded row
    positions: Int[Tensor, " N"]  # sequence position of each padded query; the query sees the keys up to there
    places: Int[Tensor, " K"]  # padded indices of real keys
    rows: Int[Tensor, " K"] | None = None  # rows of the real keys; None: K = M, and `places` are in row order

    def to(self, device: torch.device) -> SegmentKeys:
        rows = None if self.rows is None else self.rows.to(device)
        return SegmentKeys(self.pad_rows.to(device), self.positions.to(device), self.places.to(device), rows)


def plan_segments(
    bounds: Int[Tensor, " S+1"],
    prefixes: Int[Tensor, "S 2"] | None = None,
    context_rank: int = 0,
    context_size: int = 1,
) -> SegmentPlan:
    """Group the segments between `bounds` (first 0, last T) by length. All tensors are on the CPU.

    prefixes: first row and number of the rows that a segment continues. The segment sees the keys of these rows, then
    the keys of the segment. With 0 rows, or None, the segment is a whole sequence.

    Context parallelism excludes prefixes. `bounds` then separate whole sequences, and this rank has the rows
    `context.rows_of_rank`. No segment is empty.
    """
    starts, lengths = bounds[:-1].long(), bounds.long().diff()
    if prefixes is None:
        prefixes = torch.zeros(len(lengths), 2, dtype=torch.long)
    prefix_lengths = prefixes[:, 1]
    order, counts = _by_length(lengths + prefix_lengths, prefix_lengths > 0)
    starts, lengths, prefix_lengths, prefixes = starts[order], lengths[order], prefix_lengths[order], prefixes[order]
    keys = _side_by_side(starts, lengths + prefix_lengths, counts, prefixes)
    if context_size > 1:
        queries = _side_by_side(starts // context_size, lengths // context_size, counts)
        local_rows = rows_of_rank(bounds, context_rank, context_size)
        in_sequence = local_rows - bounds[:-1].long().repeat_interleave(bounds.long().diff())[local_rows]
        gathered = gathered_places(bounds, context_size)
        places = torch.empty(len(gathered), dtype=torch.long)
        places[gathered] = keys.places()
        segment_keys = SegmentKeys(gathered[keys.rows], in_sequence[queries.rows], places)
    elif bool(prefix_lengths.any()):
        queries = _side_by_side(starts, lengths, counts)
        real_places = keys.real.nonzero().flatten()
        segment_keys = SegmentKeys(
            keys.rows, queries.columns + prefix_lengths[queries.segments], real_places, keys.rows[real_places]
        )
    else:
        queries, segment_keys = keys, None
    groups = tuple(zip(counts, queries.longest, keys.longest, strict=True))
    return SegmentPlan(groups, queries.rows, queries.places(), segment_keys)


@dataclass(frozen=True)
class _Padded:
    """Describes segments in order, each group padded to the longest segment: N padded rows."""

    longest: list[int]  # rows of the longest segment in each group
    rows: Int[Tensor, " N"]  # packed row; a segment repeats its last row as padding
    columns: Int[Tensor, " N"]  # index of that row within the segment
    segments: Int[Tensor, " N"]
    real: Bool[Tensor, " N"]  # False at padding

    def places(self) -> Int[Tensor, " T"]:
        """Return the padded index of each row; every row must have an index."""
        real_places = self.real.nonzero().flatten()
        return torch.empty_like(real_places).index_copy_(0, self.rows[real_places], real_places)


def _side_by_side(starts: Tensor, lengths: Tensor, counts: Sequence[int], prefixes: Tensor | None = None) -> _Padded:
    """Pad segments of `lengths`, `counts` of them in each group; prefixes [S, 2] are rows that they continue."""
    parts, first = [], 0
    for count in counts:
        group = torch.arange(first, first + count)[:, None]
        size = lengths[group]
        column = torch.arange(int(size.max()))[None]
        columns = torch.minimum(column, size - 1)
        rows = starts[group] + columns
        if prefixes is not None:
            begin, prefix_lengths = prefixes[first : first + count].split(1, dim=1)
            rows = torch.where(columns < prefix_lengths, begin + columns, rows - prefix_lengths)
        parts.append((rows, columns, group.expand_as(rows), column < size))
        first += count
    longest = [rows.shape[1] for rows, *_ in parts]
    return _Padded(
        longest, *(torch.cat([x.flatten() for x in group_tensors]) for group_tensors in zip(*parts, strict=True))
    )


def _by_length(lengths: Int[Tensor, " S"], continuing: Bool[Tensor, " S"]) -> tuple[Tensor, list[int]]:
    """Return the segment order, longest first, and the group sizes.

    Segments that continue others never share a group with whole sequences.
    """
    order, counts = [], []
    for mask in (~continuing, continuing):
        indices = mask.nonzero().flatten()
        descending, by_length = torch.sort(lengths[indices], descending=True, stable=True)
        order.append(indices[by_length])
        counts += _group_sizes(descending)
    return torch.cat(order), counts


def _group_sizes(lengths: Int[Tensor, " S"]) -> list[int]:
    """Return the group sizes for segments of `lengths`, longest first."""
    counts, first = [], 0
    while first < len(lengths):
        longest = int(lengths[first])
        admitted = 1 if longest <= _SHORT else max(1, int(longest * _FILL))
        counts.append(int((lengths[first:] >= admitted).sum()))
        first += counts[-1]
    return counts
