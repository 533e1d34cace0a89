"""Writes Megatron torch_dist checkpoints piece by piece: weights only, by any process and in any order.

`torch.distributed.checkpoint.save` needs a whole state dict in memory and plans all files in one process group
(https://docs.pytorch.org/docs/stable/distributed.checkpoint.html). This writer's files have the same format, so
Megatron's `dist_checkpointing.load` reads them at any tensor, pipeline and expert size. `.metadata` lists the contents
and is written last, from the records of all writers.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dppo_megatron.common.files import write_atomic

from .checkpoint_keys import StoredAt
from .operations import TensorPiece
from .safetensors_file import bytes_of
from .torch_dist_place import MARKER

_ALIGNMENT = 64  # torch.save aligns tensors within its archive; for mapped reads the archive must be aligned too


@dataclass(frozen=True, slots=True)
class Chunk:
    """Describes a global tensor's block in a file. `start` and `size` have an entry per dimension of `shape`.

    Example: in a [4, 8] weight, rows 2 and 3 have start (2, 0) and size (2, 8).
    """

    keys: tuple[str, ...]  # names for these bytes
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    offset: int
    length: int


class TorchDistFile:
    """Writes a file of chunks, which `chunks` lists. On exit every byte is on disk."""

    def __init__(self, path: Path):
        self.chunks: list[Chunk] = []
        self._name = path.name
        self._file = path.open("wb")

    def write(self, locations: Sequence[StoredAt], shape: Sequence[int], piece: TensorPiece) -> None:
        """Append `piece` of a weight. `shape` is the whole weight's shape, and `locations` are the weight's names."""
        at = locations[0]
        depth = len(at.index)
        start = [0] * len(shape)
        start[piece.dim] = piece.start
        # A storage with only these bytes: torch.save would write a view's whole storage.
        flat = torch.frombuffer(bytes_of(piece.tensor), dtype=torch.uint8).view(piece.tensor.dtype)
        tensor = flat.view(*[1] * depth, *piece.tensor.shape)
        self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
        offset = self._file.tell()
        with _without_checksums():
            torch.save(tensor, self._file)
        self.chunks.append(
            Chunk(
                keys=tuple(location.key for location in locations),
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=(*at.stacked, *shape),
                start=(*at.index, *start),
                size=tuple(tensor.shape),
                file=self._name,
                offset=offset,
                length=self._file.tell() - offset,
            )
        )

    def __enter__(self) -> TorchDistFile:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Turn off archive checksums within the context: they take as long as writing, and torch never reads them."""
    crc32_enabled = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(crc32_enabled)


def write_torch_dist_metadata(directory: Path, chunks: Iterable[Chunk]) -> None:
    """Turn `directory` with the files of `chunks` into a checkpoint. Raises `ValueError` for tensors with gaps."""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    covered: dict[str, int] = {}
    for chunk in chunks:
        size = torch.Size(chunk.size)
        for key in chunk.keys:
            stored = tensors.setdefault(
                key,
                TensorStorageMetadata(TensorProperties(getattr(torch, chunk.dtype)), torch.Size(chunk.shape), []),
            )
            index = MetadataIndex(key, chunk.start, len(stored.chunks))
            stored.chunks.append(ChunkStorageMetadata(torch.Size(chunk.start), size))
            storage[index] = _StorageInfo(chunk.file, chunk.offset, chunk.length)
            covered[key] = covered.get(key, 0) + size.numel()
    gaps = [key for key, stored in tensors.items() if covered[key] != stored.size.numel()]
    if gaps:
        raise ValueError(f"these tensors were not written completely: {', '.join(gaps)}")
    torch.save({}, directory / "common.pt")  # objects that Megatron stores once; none without training state
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    config |= {"common_backend": "torch", "common_backend_version": 1}
    metadata = Metadata(state_dict_metadata={**tensors}, storage_data=storage)
    write_atomic(directory / ".metadata", pickle.dumps(metadata))
    write_atomic(directory / MARKER, json.dumps(config))
