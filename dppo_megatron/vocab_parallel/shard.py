"""Describes the vocabulary columns in this rank's shard, and runs the forward pass's only collective."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import all_gather
from .compiled import worthwhile

HEADER = 4  # numbers before the values: first id, columns, vocab_size (-1: unlimited), token id checksum


@dataclass(frozen=True)
class Shard:
    """Describes vocabulary columns [first, first + columns); columns after the first `valid` are padding.

    tiles: number of tiles in the shard, all of equal width.
    eager: no pass is compiled. True with `tiles`, because compiled code may round differently in another process.
    """

    first: int
    columns: int
    valid: int
    vocab_size: int | None
    group: dist.ProcessGroup | None
    world: int
    tiles: int
    eager: bool

    def compiles(self, columns: int) -> bool:
        """Return whether passes over blocks of `columns` columns are compiled."""
        return not self.eager and worthwhile(columns)

    def valid_tiles(self) -> list[slice]:
        """Return this rank's columns tile by tile, without padding; a tile with only padding is empty."""
        width = self.columns // self.tiles
        return [slice(min(i * width, self.valid), min((i + 1) * width, self.valid)) for i in range(self.tiles)]


def make_shard(
    columns: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group: dist.ProcessGroup | None,
    tiles: int | None = None,
) -> Shard:
    """Describe this rank's shard. No collective. Raises ValueError if the sizes cannot add up."""
    if isinstance(group, int):
        raise TypeError(f"group must be a process group of torch.distributed or None, got {group}")
    world = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"this process is not a member of group (its rank there is {rank})")
    if vocab_size is not None and (not isinstance(vocab_size, Integral) or vocab_size < 1):
        raise ValueError(f"vocab_size must be a positive int or None, got {vocab_size!r}")
    if vocab_start is None:
        if vocab_size is not None and world * columns < vocab_size:
            raise ValueError(
                f"{world} shard(s) of {columns} columns make {world * columns}, fewer than vocab_size="
                f"{vocab_size}; pass vocab_start on every rank if the shards differ in size"
            )
        first = rank * columns
    else:
        if vocab_start < 0:
            raise ValueError(f"vocab_start must not be negative, got {vocab_start}")
        first = vocab_start
    valid = columns if vocab_size is None else min(max(vocab_size - first, 0), columns)
    if world == 1:
        if first != 0:
            raise ValueError(f"a single shard must start at column 0, got vocab_start={first}")
        if columns < 1:
            raise ValueError("logits have no columns")
    local = 1 if tiles is None else _local_tiles(tiles, columns, vocab_start, world)
    return Shard(first, columns, valid, vocab_size, group if world > 1 else None, world, local, tiles is not None)


def _local_tiles(tiles: int, columns: int, vocab_start: int | None, world: int) -> int:
    if not isinstance(tiles, Integral) or tiles < 1:
        raise ValueError(f"tiles must be a positive int or None, got {tiles!r}")
    if vocab_start is not None:
        raise ValueError(f"tiles={tiles} requires shards of equal size; omit vocab_start")
    if tiles % world:
        raise ValueError(f"tiles={tiles} must be a multiple of the {world} ranks of the group")
    if world * columns % tiles:
        raise ValueError(
            f"tiles={tiles} does not divide {world} shard(s) of {columns} columns; pad the vocabulary to a multiple"
        )
    return tiles // world


def _checksum(ids: Tensor) -> Tensor:
    weights = torch.arange(ids.numel(), device=ids.device).mul_(2654435761).add_(97).view_as(ids)
    return (ids * weights).sum()


def write_header(row: Tensor, shard: Shard, *ids: Tensor) -> None:
    """Write into `row` the numbers that let the other ranks detect a disagreement."""
    row[3] = torch.stack([_checksum(tensor) for tensor in ids]).sum().bitwise_and_(0xFFFFFF)
    # `fill_` does not wait for the device; an assignment to row[i], or a tensor made on the host, would.
    for place, number in enumerate((shard.first, shard.columns, -1 if shard.vocab_size is None else shard.vocab_size)):
        row[place].fill_(number)


def gather_rows(packed: Tensor, shard: Shard) -> Tensor:
    """All-gather [rows, width] to [world, rows, width]: the forward pass's only collective.

    After a gather, unlike a reduction, every rank adds the same numbers in the same order and gets the same bits.
    """
    gathered = packed.new_empty((shard.world * packed.shape[0], packed.shape[1]))
    all_gather(gathered, packed, shard.group)
    return gathered.view(shard.world, *packed.shape)


def total_columns(shard: Shard, headers: list[list[float]] | None) -> int:
    """Return the number of columns in the whole vocabulary, padding included, after checking that the ranks agree.

    headers: the gathered headers from every rank, None for a single shard. All ranks see the same headers, so all raise
    together. Raises ValueError with the sizes.
    """
    if headers is None:
        return shard.columns
    starts, sizes, vocab_sizes, checksums = (list(map(int, column)) for column in zip(*headers, strict=True))
    if len(set(vocab_sizes)) > 1:
        raise ValueError(f"vocab_size differs between the ranks of the group: {vocab_sizes} (-1 is None)")
    if len(set(checksums)) > 1:
        raise ValueError(
            "target_ids or topk_ids differ between the ranks of the group, or sampling masks; they must be replicated, "
            "for sequence-parallel logits gather them along the sequence first"
        )
    end = 0
    for start, size in zip(starts, sizes, strict=True):
        if start != end:
            raise ValueError(
                f"the shards do not tile the vocabulary: first columns {starts} with sizes {sizes}; "
                "pass vocab_start on every rank if the shards differ in size"
            )
        end += size
    if shard.vocab_size is not None and end < shard.vocab_size:
        raise ValueError(f"shards of {sizes} columns have {end} in all, fewer than vocab_size={shard.vocab_size}")
    return end
