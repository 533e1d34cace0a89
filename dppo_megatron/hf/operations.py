"""Merges Hugging Face tensors into a Megatron tensor and shards it over tensor-parallel ranks.

Every operation is pure and stores only sizes. A rank's shard merges a slice of each part, so `to_shard` reads only
that rank's bytes (parts may be views of a memory-mapped file). Shapes are `[rows, columns]` for a linear weight and
`[rows]` for a bias or norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Operation(Protocol):
    """Converts between HF parts and Megatron shards. No collectives; keeps dtype and device.

    A class that derives from this one shards the tensor, by default into equal row blocks in rank order.
    """

    @property
    def replicated(self) -> bool:
        """Return whether every tensor-parallel rank has the whole tensor."""
        return False

    def to_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the shard for rank `rank` of `size`. Raises `ValueError` if sizes do not divide."""

    def from_shards(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the HF parts from the shards of all ranks, in rank order."""

    def pieces(self, parts: Sequence[Tensor], rank: int, size: int) -> list[TensorPiece]:
        """Return the blocks of the whole Megatron tensor that rank `rank` of `size` has, with offsets.

        A replicated tensor has no blocks on ranks other than 0. Raises `ValueError` as `to_shard` does.
        """
        shard = self.to_shard(parts, rank, size)
        return [TensorPiece(shard, rank * shard.shape[0])]


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Describes a block in a whole tensor. It begins at `start` along `dim` and spans all other dimensions.

    Example: in a [4, 3] tensor, the second half along dim 0 is a [2, 3] tensor with start 2.
    """

    tensor: Tensor
    start: int = 0
    dim: int = 0


def slice_of(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """Return a view of the `rank`-th of `size` equal pieces along `dim`."""
    length, remainder = divmod(tensor.shape[dim], size)
    if remainder:
        raise ValueError(f"dimension {dim} of shape {tuple(tensor.shape)} does not divide over {size} ranks")
    return tensor.narrow(dim, rank * length, length)


@dataclass(frozen=True, slots=True)
class Replicated:
    """Keeps the whole tensor on every rank, for norms and routers."""

    replicated = True

    def to_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return parts[0]

    def from_shards(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (shards[0],)

    def pieces(self, parts: Sequence[Tensor], rank: int, size: int) -> list[TensorPiece]:
        return [TensorPiece(self.to_shard(parts, rank, size))] if rank == 0 else []


@dataclass(frozen=True, slots=True)
class Sharded(Operation):
    """Shards an HF tensor along `dim`: 0 = column-parallel (outputs), 1 = row-parallel (inputs)."""

    dim: int

    def to_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return slice_of(parts[0], self.dim, rank, size)

    def from_shards(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (_cat(shards, self.dim),)

    def pieces(self, parts: Sequence[Tensor], rank: int, size: int) -> list[TensorPiece]:
        shard = self.to_shard(parts, rank, size)
        return [TensorPiece(shard, rank * shard.shape[self.dim], self.dim)]


@dataclass(frozen=True, slots=True)
class GateUp(Operation):
    """Concatenates SwiGLU's gate and up projections.

    Both are sharded first, so rank r has [gate_r; up_r] and splits the output without communication.

    Example: with gate rows g0 to g3 and up rows u0 to u3, the second of 2 ranks has g2 g3 u2 u3.
    """

    def to_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return torch.cat([slice_of(part, 0, rank, size) for part in parts])

    def from_shards(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        halves = [shard.chunk(2) for shard in shards]
        return tuple(_cat(part, 0) for part in zip(*halves, strict=True))

    def pieces(self, parts: Sequence[Tensor], rank: int, size: int) -> list[TensorPiece]:
        """Return pieces with the whole gate before the whole up, so that any number of ranks can shard them."""
        slices = [slice_of(part, 0, rank, size) for part in parts]
        gate_rows = parts[0].shape[0]
        return [TensorPiece(s, i * gate_rows + rank * s.shape[0]) for i, s in enumerate(slices)]


@dataclass(frozen=True, slots=True)
class QKV(Operation):
    """Interleaves queries, keys and values by query group: [q of group 0, k_0, v_0, q of group 1, ...].

    Applies to weights `[rows, columns]` and biases `[rows]`. Example: 4 heads in 2 groups have the order q0 q1 k0 v0 q2
    q3 k1 v1, so each of 2 ranks has a whole group. With fewer groups than ranks Megatron splits the interleaved tensor
    evenly, even inside a group.

    `gated` means that in HF tensors each head's output gate follows the head's queries, [q0 g0 q1 g1 ...]. In Megatron
    a group's gates follow the group's queries, [q0 q1 g0 g1 k0 v0 ...].
    """

    num_heads: int
    num_groups: int
    head_dim: int
    gated: bool = False

    def to_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        if self.num_groups < size:
            return slice_of(self._interleave(parts, self.num_groups), 0, rank, size)
        if self.num_groups % size:
            raise ValueError(f"{self.num_groups} query groups do not divide over {size} ranks")
        return self._interleave([slice_of(part, 0, rank, size) for part in parts], self.num_groups // size)

    def from_shards(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        whole = _cat(shards, 0)
        columns = whole.shape[1:]
        per_group = self.num_heads // self.num_groups
        queries = 2 * per_group if self.gated else per_group
        grouped = whole.view(self.num_groups, queries + 2, self.head_dim, *columns)
        q, k, v = grouped.split([queries, 1, 1], dim=1)
        if self.gated:
            q = q.reshape(self.num_groups, 2, per_group, self.head_dim, *columns).transpose(1, 2)
        return tuple(part.reshape(-1, *columns) for part in (q, k, v))

    def _interleave(self, parts: Sequence[Tensor], groups: int) -> Tensor:
        q, k, v = parts
        columns = q.shape[1:]
        if self.gated:
            q = q.reshape(groups, -1, 2, self.head_dim, *columns).transpose(1, 2)
        grouped = [part.reshape(groups, -1, self.head_dim, *columns) for part in (q, k, v)]
        return torch.cat(grouped, dim=1).reshape(-1, *columns)


@dataclass(frozen=True, slots=True)
class ByGroup(Operation):
    """Interleaves sections of HF tensors by head group, so that a rank has all sections of its groups.

    `sections` has the row counts of all sections in each HF tensor. Every section is divided into `groups` equal
    blocks. Example: with 2 groups, a tensor with sections q [4] and k [2] and another tensor with section z [2] become
    q0 q1 k0 z0 q2 q3 k1 z1.
    """

    groups: int
    sections: tuple[tuple[int, ...], ...]

    def to_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        if self.groups % size:
            raise ValueError(f"{self.groups} groups of heads do not divide over {size} ranks")
        columns = parts[0].shape[1:]
        split = (s for part, rows in zip(parts, self.sections, strict=True) for s in part.split(rows))
        grouped = [slice_of(s, 0, rank, size).reshape(self.groups // size, -1, *columns) for s in split]
        return torch.cat(grouped, dim=1).reshape(-1, *columns)

    def from_shards(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        whole = _cat(shards, 0)
        columns = whole.shape[1:]
        blocks = [rows // self.groups for part_rows in self.sections for rows in part_rows]
        split = iter(whole.view(self.groups, -1, *columns).split(blocks, dim=1))
        return tuple(_cat([next(split).reshape(-1, *columns) for _ in part_rows], 0) for part_rows in self.sections)


@dataclass(frozen=True, slots=True)
class OfExpert:
    """Takes one expert from HF weights [experts, inputs, outputs] or HF biases [experts, outputs].

    `op` applies to the transposed weight. `GateUp` parts are interleaved: gate 0, up 0, gate 1, up 1. `from_shards`
    returns the expert's weight [inputs, outputs]; the export stacks the experts.
    """

    op: Operation
    expert: int = 0

    @property
    def replicated(self) -> bool:
        return self.op.replicated

    def to_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return self.op.to_shard(self._parts(parts), rank, size)

    def from_shards(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        parts = self.op.from_shards(shards)
        whole = torch.stack(parts, dim=1).flatten(0, 1) if len(parts) > 1 else parts[0]
        return (whole.mT if whole.dim() == 2 else whole,)

    def pieces(self, parts: Sequence[Tensor], rank: int, size: int) -> list[TensorPiece]:
        return self.op.pieces(self._parts(parts), rank, size)

    def _parts(self, parts: Sequence[Tensor]) -> list[Tensor]:
        expert_tensor = parts[0][self.expert]
        expert_tensor = expert_tensor.mT if expert_tensor.dim() == 2 else expert_tensor
        return [expert_tensor[0::2], expert_tensor[1::2]] if isinstance(self.op, GateUp) else [expert_tensor]


@dataclass(frozen=True, slots=True)
class Vocabulary(Operation):
    """Pads the embedding or output head with zero rows up to `padded_size`, then shards the rows over ranks.

    Example: 10 rows padded to 12 give each of 2 ranks 6 rows, and rank 1 has the 2 zero rows. In the head, zero rows
    give logit 0 to ids that no tokenizer has, so the loss must mask these ids (`vocab_size` of the loss).
    """

    size: int
    padded_size: int

    def to_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        rows, remainder = divmod(self.padded_size, size)
        if remainder:
            raise ValueError(f"padded vocabulary of {self.padded_size} does not divide over {size} ranks")
        shard = parts[0][rank * rows : (rank + 1) * rows]  # has no rows beyond `size`
        missing = rows - shard.shape[0]
        return torch.cat([shard, shard.new_zeros(missing, *shard.shape[1:])]) if missing else shard

    def from_shards(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (_cat(shards, 0)[: self.size],)

    def pieces(self, parts: Sequence[Tensor], rank: int, size: int) -> list[TensorPiece]:
        """Return nearly equal pieces without padding: readers pad to the size that they need."""
        rows = -(-self.size // size)
        start = min(rank * rows, self.size)
        return [TensorPiece(parts[0][start : start + rows], start)] if start < self.size else []


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
