"""Plan a broadcast: the tensors, their buckets, the trainer rank that sends them, and the order.

A sender is a trainer rank that sends weights. Example: 2 senders, 2 engines of 2 workers, 2 layers with experts:

    sender 0   bucket 0: embed_tokens, attention of layers 0, 1   bucket 1: layer 0 experts 0-3   bucket 2: layer 1 ...
    sender 1   bucket 0: final norm, lm_head                      bucket 1: layer 0 experts 4-7   bucket 2: layer 1 ...
    order      (0, 0) (1, 0) | (0, 1) (1, 1) | (0, 2) (1, 2)      of (sender, bucket): dense, then expert layer by layer
    groups     "weights-1f-0": sender 0 as rank 0, then workers 1 to 4;  "weights-1f-1": sender 1, the same workers

Every worker receives every bucket whole and keeps a shard of each tensor. Both sides use this module, which depends
only on torch and pydantic.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import ConfigDict, Field, TypeAdapter
from torch import Tensor

from dppo_megatron.common.dtypes import DTYPES

Backend = Literal["gloo", "nccl"]
# Small buckets stay in memory that the allocator already has; on a GPU, large buckets saturate the network.
BUCKET_BYTES: dict[Backend, int] = {"gloo": 16 << 20, "nccl": 256 << 20}

TEXT = 4096  # most characters in a name or a path
# Values in a request to an engine.
Int32 = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1, max_length=TEXT)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
DType = Annotated[str, Field(pattern="|".join(f"^{dtype.long}$" for dtype in DTYPES.values()))]

_EXPERT = re.compile(r"\blayers\.(\d+)\..*\bexperts\.\d")


class TensorSpec(NamedTuple):
    """Describes one tensor, named as in Hugging Face."""

    name: Text
    dtype: DType  # in torch's spelling: "bfloat16"
    shape: tuple[Annotated[int, Field(ge=0, lt=2**48)], ...]

    @classmethod
    def from_tensor(cls, name: str, tensor: Tensor) -> TensorSpec:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


Bucket = tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class WeightGroupPlan:
    """Contains the data that a worker needs to join the weight groups of all senders.

    `streams[s]` has the buckets that sender `s` sends in every update; workers take the buckets in `order`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Text  # unique to this group
    host: Text  # address of the store, as the engine reaches it
    port: Annotated[int, Field(ge=1, le=65535)]
    backend: Backend
    timeout_s: Seconds  # time limit of each step
    workers: Annotated[int, Field(ge=1, lt=2**20)]  # number in all engines
    streams: tuple[tuple[Bucket, ...], ...]
    first_worker: Int32 = 0  # index of the engine's first worker among all workers
    nccl: Annotated[str, Field(max_length=TEXT)] = ""  # the trainer's NCCL version; "" with gloo
    nccl_cumem: Annotated[str, Field(max_length=TEXT)] = ""  # the trainer's NCCL_CUMEM_ENABLE; "" if not set

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WeightGroupPlan:
        return TypeAdapter(cls).validate_python(value)

    def group(self, sender: int) -> str:
        """Return the group name of `sender`."""
        return f"{self.name}-{sender}"

    def order(self) -> Iterator[tuple[int, int, Bucket]]:
        """Yield (sender, index in the sender's stream, bucket) in the order that all workers follow.

        Dense weights come sender by sender, then experts layer by layer across senders. A worker may buffer a layer's
        experts until the layer is complete, and each sender has a few experts from every layer.
        """

        def with_keys(sender: int, stream: tuple[Bucket, ...]) -> Iterator[tuple[tuple[int, int, int], int, Bucket]]:
            for number, bucket in enumerate(stream):
                yield (expert_layer(bucket[0].name), sender, number), sender, bucket

        keyed = (with_keys(sender, stream) for sender, stream in enumerate(self.streams))
        for (_, _, number), sender, bucket in heapq.merge(*keyed, key=lambda entry: entry[0]):
            yield sender, number, bucket

    def tensors(self) -> Iterator[TensorSpec]:
        return (spec for stream in self.streams for bucket in stream for spec in bucket)


def expert_layer(name: str) -> int:
    """Return the layer number of an expert tensor; -1 for all other tensors."""
    match = _EXPERT.search(name)
    return int(match[1]) if match else -1


def make_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Fill buckets in the order of `specs`; a tensor larger than `bucket_bytes` gets a separate bucket.

    Experts in another layer begin a new bucket. So does a tensor that would not be aligned, because there is no
    padding.
    """
    buckets: list[list[TensorSpec]] = []
    filled, layer = 0, -1
    for spec in specs:
        full = filled + spec.nbytes > bucket_bytes or filled % getattr(torch, spec.dtype).itemsize
        previous_layer, layer = layer, expert_layer(spec.name)
        if not buckets or full or layer != previous_layer:
            buckets.append([])
            filled = 0
        buckets[-1].append(spec)
        filled += spec.nbytes
    return tuple(map(tuple, buckets))


def bucket_bytes(bucket: Bucket) -> int:
    return sum(spec.nbytes for spec in bucket)


def views(flat: Tensor, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for every tensor in `bucket`, as views of the bucket's bytes `flat` [bucket_bytes] uint8."""
    start = 0
    for spec in bucket:
        yield spec.name, flat[start : start + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        start += spec.nbytes
