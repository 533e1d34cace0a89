"""Maps LoRA adapters on Megatron's linear layers to PEFT tensors. A Megatron layer may fuse several HF layers.

In each Hugging Face layer PEFT adds (alpha / r) B A x to W x, with A [r, inputs] and B [outputs, r]
(https://arxiv.org/abs/2106.09685, equation 3). A fused layer stacks the A's, and each output belongs to one HF
layer. So B has as many rows as the weight, and the weight's rule in the family table also shards B. Each row of B
multiplies only the A of the row's HF layer, so the sum equals PEFT's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .megatron_model import unwrap
from .operations import Operation, Replicated, Sharded, TensorPiece
from .rules import Entry, HFTensor
from .weight_map import WeightMap

PEFT_PREFIX = "base_model.model."
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Stacked(Replicated):
    """Stacks equally shaped tensors, replicated on every rank: the A's in a layer that shards outputs."""

    count: int

    def to_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return torch.cat(list(parts))

    def from_shards(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return shards[0].chunk(self.count)


@dataclass(frozen=True, slots=True)
class PartlyStored(Operation):
    """Stores only the parts `indices` of `op`, for B if only some fused layers are targets. Other parts are 0."""

    op: Operation
    rows: tuple[int, ...]  # row count of every part, stored or not
    indices: tuple[int, ...]

    def to_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return self.op.to_shard(self._with_zeros(parts), rank, size)

    def from_shards(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        parts = self.op.from_shards(shards)
        return tuple(parts[index] for index in self.indices)

    def pieces(self, parts: Sequence[Tensor], rank: int, size: int) -> list[TensorPiece]:
        return self.op.pieces(self._with_zeros(parts), rank, size)

    def _with_zeros(self, parts: Sequence[Tensor]) -> list[Tensor]:
        stored = dict(zip(self.indices, parts, strict=True))
        zeros = (parts[0].new_zeros(rows, *parts[0].shape[1:]) for rows in self.rows)
        return [stored.get(index, zero) for index, zero in enumerate(zeros)]


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """Describes a weight's adapter: the entries for A and B, named as in PEFT files."""

    weight: str  # global Megatron name
    a: Entry
    b: Entry

    @property
    def shards_inputs(self) -> bool:
        return isinstance(self.a.op, Sharded)


def adapter_entry(entry: Entry, targets: Sequence[str], r: int) -> AdapterEntry | None:
    """Return a weight's adapter, or None if the layer is not linear or not in `targets`."""
    if not is_linear(entry):
        return None
    target_indices = [index for index, tensor in enumerate(entry.hf) if is_target(tensor.name, targets)]
    if not target_indices:
        return None
    op: Operation = entry.op
    a_op: Operation = Stacked(len(target_indices))
    if isinstance(op, Sharded) and op.dim == 1:
        a_op, op = op, Replicated()
    elif len(target_indices) < len(entry.hf):
        op = PartlyStored(op, tuple(tensor.shape[0] for tensor in entry.hf), tuple(target_indices))
    tensors = [entry.hf[index] for index in target_indices]

    def part(which: str, op: Operation, shapes: list[tuple[int, ...]]) -> Entry:
        names = [f"{PEFT_PREFIX}{t.name.removesuffix(_WEIGHT)}.lora_{which}{_WEIGHT}" for t in tensors]
        return replace(
            entry,
            megatron=f"{entry.megatron.removesuffix(_WEIGHT)}.lora.{which}",
            hf=tuple(map(HFTensor, names, shapes)),
            rule=replace(entry.rule, op=op),
        )

    return AdapterEntry(
        entry.megatron,
        part("A", a_op, [(r, t.shape[1]) for t in tensors]),
        part("B", op, [(t.shape[0], r) for t in tensors]),
    )


def is_linear(entry: Entry) -> bool:
    """Return whether the weight's layer may have an adapter: a linear layer, but no router, embedding or head."""
    tensor = entry.hf[0]
    router = tensor.name.endswith((".mlp.gate.weight", ".mlp.router.weight", ".shared_expert_gate.weight"))
    is_matrix = len(tensor.shape) == 2 and tensor.name.endswith(_WEIGHT)
    return entry.layer is not None and is_matrix and not router  # embedding and head are in no layer


def target_problems(weight_map: WeightMap, targets: Sequence[str]) -> list[str]:
    """List the `targets` that name no linear layer, and the decoder layers without an adapter, one line each."""
    layers = {
        layer: [t.name for entry in weight_map.layer_entries(layer, [0]) if is_linear(entry) for t in entry.hf]
        for layer in range(weight_map.config.num_layers)
    }
    names = {name for layer_names in layers.values() for name in layer_names}
    available = ", ".join(sorted({name.removesuffix(_WEIGHT).rpartition(".")[2] for name in names}))
    unknown = [target for target in targets if not any(is_target(name, [target]) for name in names)]
    bare_layers = [
        str(layer) for layer, layer_names in layers.items() if not any(is_target(n, targets) for n in layer_names)
    ]
    out = [
        f"{target} names no linear layer of {weight_map.config.architecture}; it has {available}" for target in unknown
    ]
    if bare_layers and not unknown:
        out.append(f"no adapter in layers {', '.join(bare_layers)}; every layer needs one, so name e.g. q_proj of all")
    return out


def is_target(name: str, targets: Sequence[str]) -> bool:
    """Match a target as PEFT matches a list: against the layer name, or the end of the name after a dot."""
    layer = "." + name.removesuffix(_WEIGHT)
    return any(layer.endswith(f".{target}") for target in targets)


class Adapter(nn.Module):
    """Contains this rank's part of an adapter, in the dtype and on the device of the layer's `weight` [rows, columns].

    A has shape [n r, columns] for n Hugging Face target layers, and B has shape [rows, r]. `owner` [rows, n] is 1 where
    an output belongs to a layer. It is None if all outputs belong to one layer. A and B are initialized as in
    PEFT: A is uniform within 1 / sqrt(inputs), drawn from `seed` and the tensor name, so that every layout draws equal
    values; B is 0.
    """

    owner: Tensor | None

    def __init__(self, entry: AdapterEntry, weight: Tensor, *, scaling: float, rank: int, size: int, seed: int):
        super().__init__()
        self.entry = entry
        self.scaling = scaling
        self.enabled = True
        starts = [torch.empty(t.shape) if weight.is_meta else _start(t, seed) for t in entry.a.hf]
        self.A = nn.Parameter(entry.a.op.to_shard(starts, rank, size).to(weight).contiguous())
        zeros = [torch.zeros(tensor.shape) for tensor in entry.b.hf]
        self.B = nn.Parameter(entry.b.op.to_shard(zeros, rank, size).to(weight).contiguous())
        owner = None
        if len(entry.b.hf) > 1 or isinstance(entry.b.op, PartlyStored):
            numbers = [torch.full((tensor.shape[0], 1), float(n + 1)) for n, tensor in enumerate(entry.b.hf)]
            numbered = entry.b.op.to_shard(numbers, rank, size)
            owner = (numbered == torch.arange(1, len(numbers) + 1)).to(weight)
        self.register_buffer("owner", owner, persistent=False)

    def outputs(self) -> Tensor:
        """Return B as [rows, n r]: each row fills the columns of the row's layer, and other columns are 0."""
        return self.B if self.owner is None else spread(self.B, self.owner)

    def merged(self, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return this rank's part of W + (alpha / r) B A, added in fp32, rounded once to `dtype` or `weight`'s."""
        whole = weight.to(torch.float32, copy=True)
        whole.addmm_(self.outputs().float(), self.A.float(), alpha=self.scaling)
        return whole.to(dtype or weight.dtype)


def spread(b: Tensor, owner: Tensor) -> Tensor:
    """Spread b [..., rows, r] to [..., rows, n r]: zero except for the layer that owner [..., rows, n] marks.

    Example: b [[1, 2]] with owner [[0, 1]] gives [[0, 0, 1, 2]].
    """
    return (owner[..., None] * b[..., None, :]).flatten(-2)


def adapters_of(model_chunks: Sequence[nn.Module]) -> Iterator[Adapter]:
    """Yield the adapters on this rank. All ranks in a tensor-parallel group yield them in the same order."""
    for chunk in map(unwrap, model_chunks):
        yield from (module for module in chunk.modules() if isinstance(module, Adapter))


def _start(tensor: HFTensor, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed} {tensor.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    bound = 1 / math.sqrt(tensor.shape[1])
    return torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator)
