"""What a broadcast of weights sends: which tensors, in which buckets, from which trainer rank, in which order.

Used by both sides and in need of torch alone. A trainer rank that sends weights is a sender.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Backend = Literal["gloo", "nccl"]
# Small buckets stay in memory the allocator already holds; on a GPU, large ones fill the network.
BUCKET_BYTES: dict[Backend, int] = {"gloo": 16 << 20, "nccl": 256 << 20}

_EXPERT = re.compile(r"\blayers\.(\d+)\..*\bexperts\.\d")


class TensorSpec(NamedTuple):
    """One tensor in Hugging Face names."""

    name: str
    dtype: str  # as torch spells it: "bfloat16"
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


Bucket = tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class WeightGroupPlan:
    """Everything a worker must know to join.

    `streams[s]` is, in order, what sender `s` sends in every update; workers take the buckets in `order`.
    """

    name: str  # unique to this group
    host: str  # of the store, as the engine reaches it
    port: int
    backend: Backend
    timeout_s: float  # of every single step
    workers: int  # of all engines
    streams: tuple[tuple[Bucket, ...], ...]
    first_worker: int = 0  # number of the engine's first worker among all
    nccl: str = ""  # the trainer's version of NCCL; "" with gloo
    nccl_cumem: str = ""  # its NCCL_CUMEM_ENABLE; "" where it is not set

    def for_engine(self, host: str, first_worker: int) -> WeightGroupPlan:
        return replace(self, host=host, first_worker=first_worker)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WeightGroupPlan:
        streams = tuple(
            tuple(tuple(TensorSpec(n, d, tuple(s)) for n, d, s in bucket) for bucket in stream)
            for stream in value["streams"]
        )
        return cls(**{**value, "streams": streams})

    def group(self, sender: int) -> str:
        """Name of the group of that sender."""
        return f"{self.name}-{sender}"

    def order(self) -> Iterator[tuple[int, int, Bucket]]:
        """(sender, number in its stream, bucket) of every bucket, as all workers take them.

        Dense weights sender by sender, then experts layer by layer across senders: a worker may hold what it got of a
        layer until the layer is complete, and one sender has a few experts of every layer.
        """

        def with_keys(sender: int, stream: tuple[Bucket, ...]) -> Iterator[tuple[tuple[int, int, int], int, Bucket]]:
            for number, bucket in enumerate(stream):
                yield (expert_layer(bucket[0].name), sender, number), sender, bucket

        parts = (with_keys(sender, stream) for sender, stream in enumerate(self.streams))
        for (_, _, number), sender, bucket in heapq.merge(*parts, key=lambda part: part[0]):
            yield sender, number, bucket

    def tensors(self) -> Iterator[TensorSpec]:
        return (spec for stream in self.streams for bucket in stream for spec in bucket)


def expert_layer(name: str) -> int:
    """Number of the layer whose expert the tensor belongs to; -1 for all other tensors."""
    found = _EXPERT.search(name)
    return int(found[1]) if found else -1


def make_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """In the order of `specs`, as many to a bucket as fit; one larger than `bucket_bytes` is alone.

    Experts of another layer begin a bucket. So does a tensor that would not be aligned: they lie end to end.
    """
    buckets: list[list[TensorSpec]] = []
    filled, layer = 0, -1
    for spec in specs:
        full = filled + spec.nbytes > bucket_bytes or filled % getattr(torch, spec.dtype).itemsize
        before, layer = layer, expert_layer(spec.name)
        if not buckets or full or layer != before:
            buckets.append([])
            filled = 0
        buckets[-1].append(spec)
        filled += spec.nbytes
    return tuple(map(tuple, buckets))


def bucket_bytes(bucket: Bucket) -> int:
    return sum(spec.nbytes for spec in bucket)


def views(flat: Tensor, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor of `bucket` as views of its bytes, `flat` [bucket_bytes] uint8."""
    start = 0
    for spec in bucket:
        yield spec.name, flat[start : start + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        start += spec.nbytes
