"""Exports weights from live Megatron ranks under Hugging Face names, as a stream for weight sync or to a directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dppo_megatron.common.ranks import Ranks

from . import fp8
from .errors import ModelError
from .hf_config import HFModelConfig
from .lora import Adapter, adapters_of
from .megatron_model import ParallelRanks, ShardGroup, infer_layout, named_weights
from .parse_config import read_hf_config
from .rules import Entry
from .safetensors_file import TensorInfo
from .safetensors_writer import DEFAULT_SHARD_BYTES, Part, PartWriter, assemble, copy_metadata
from .staged import write_staged
from .turns import Turns
from .weight_map import WeightMap
from .weight_source import all_finite, export_problem, overflow_problem

DEFAULT_BUCKET_BYTES = 256 << 20

Quantization = Literal["fp8_block", "fp8_block_emulated"]
BeforeGather = Callable[[ShardGroup], None] | None


@torch.no_grad()
def export_weights(
    model_chunks: Sequence[nn.Module],
    config: HFModelConfig,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ranks: ParallelRanks | None = None,
    quantization: Quantization | None = None,
    before_gather: BeforeGather = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, whole tensor) for every weight that this rank exports. Every rank must exhaust the iterator.

    Only the source rank yields a weight, so over all ranks each HF tensor is yielded exactly once. The source rank is
    tensor-parallel rank 0 in the weight's pipeline stage (and expert-parallel rank), in the first data-parallel
    replica. A weight with an adapter is exported as W + (alpha / r) B A, merged one tensor at a time.

    Collectives: local shards fill buckets of at most `bucket_bytes`; a larger shard fills a bucket by itself. A
    `gather` sends each bucket to the source rank, in the tensor- or expert-tensor-parallel group of the first replica.
    Stacked expert tensors need another `gather` in the expert-parallel group. A group with one rank has no
    collectives. Each rank in the group first calls `before_gather`, which may wait for a late source rank.

    Tensors are cast to `dtype` before gathering; None keeps each parameter's dtype. With `quantization` "fp8_block" the
    source rank quantizes each whole projection and also yields the scales, as `hf.fp8` describes. With
    "fp8_block_emulated" it yields the dequantized values, in the dtype before quantization. Tensors are on the
    parameters' device and may be views of live parameters, so use or clone them before the next optimizer step.

    Raises `ModelError` for a parameter without an HF counterpart.
    """
    ranks = ranks or ParallelRanks.current()
    weight_map = WeightMap(config, infer_layout(model_chunks, config, ranks))
    weights = _weights(model_chunks, weight_map)
    tensors = _whole_tensors(weight_map, weights, ranks, dtype, bucket_bytes, before_gather)
    if quantization is not None:
        tensors = fp8.quantize_projections(tensors, emulated=quantization == "fp8_block_emulated")
    yield from tensors


@torch.no_grad()
def overflowing(
    model_chunks: Sequence[nn.Module], config: HFModelConfig, dtype: torch.dtype, ranks: ParallelRanks | None = None
) -> list[str]:
    """Return a line for each weight that overflows in `dtype` on this rank. No collectives.

    Broadcasts need this check before `export_weights` sends anything. Files are checked as they are written. For fp16
    the check reads all local weights once. Other dtypes have fp32's range and need no check.
    """
    if dtype != torch.float16:
        return []
    weight_map = WeightMap(config, infer_layout(model_chunks, config, ranks or ParallelRanks.current()))
    return [
        overflow_problem(*(tensor.name for tensor in weight.entry.hf))
        for weight in _weights(model_chunks, weight_map)
        if not all_finite(weight.exported(dtype))
    ]


def _weights(model_chunks: Sequence[nn.Module], weight_map: WeightMap) -> list[_Weight]:
    adapters = {adapter.entry.weight: adapter for adapter in adapters_of(model_chunks)}
    weights = []
    for name, weight in named_weights(model_chunks):
        entry = weight_map.entry(name)
        if not entry.rule.duplicate:
            weights.append(_Weight(entry, weight, adapters.get(name)))
    return weights


@torch.no_grad()
def export_adapters(
    model_chunks: Sequence[nn.Module],
    config: HFModelConfig,
    dtype: torch.dtype | None = None,
    ranks: ParallelRanks | None = None,
    before_gather: BeforeGather = None,
    folded: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (PEFT name, whole tensor) for every A and B on the source rank, as `export_weights` does.

    `folded` yields (alpha / r) B instead of B, multiplied in fp32 and rounded once.
    """
    ranks = ranks or ParallelRanks.current()
    weights = [
        weight
        for adapter in adapters_of(model_chunks)
        for weight in (
            _Weight(adapter.entry.a, adapter.A),
            _Weight(adapter.entry.b, adapter.B, times=adapter.scaling if folded else 1.0),
        )
    ]
    yield from _whole_tensors(WeightMap(config), weights, ranks, dtype, DEFAULT_BUCKET_BYTES, before_gather)


@dataclass(frozen=True, slots=True)
class _Weight:
    entry: Entry
    tensor: Tensor
    adapter: Adapter | None = None
    times: float = 1.0

    def exported(self, dtype: torch.dtype | None) -> Tensor:
        dtype = None if self.entry.rule.keep_dtype else dtype
        if self.adapter is not None and self.adapter.enabled:
            return self.adapter.merged(self.tensor, dtype)
        local = self.tensor.detach()
        if self.times != 1:
            return (local.float() * self.times).to(dtype or local.dtype)
        return local if dtype is None else local.to(dtype)


def _whole_tensors(
    weight_map: WeightMap,
    weights: Sequence[_Weight],
    ranks: ParallelRanks,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    before_gather: BeforeGather,
) -> Iterator[tuple[str, Tensor]]:
    """Cast weights, gather them bucket by bucket, and yield (HF name, whole tensor) on the source ranks."""
    stacks: dict[str, list[Tensor]] = {}
    # All ranks must enter the groups in the same order: dense weights first, then experts, which use another group.
    for experts, group, exports in (
        (False, ranks.tensor, ranks.first_replica),
        (True, ranks.expert_tensor, ranks.first_expert_replica),
    ):
        group_weights = (weight for weight in weights if exports and weight.entry.is_expert == experts)
        for entry, shards in _gathered(group_weights, group, dtype, bucket_bytes, before_gather):
            parts = weight_map.to_hf(entry, shards)
            if entry.stacks_experts:
                parts = _complete_stacks(stacks, entry, parts, ranks.expert, before_gather)
            yield from parts.items()


def _complete_stacks(
    stacks: dict[str, list[Tensor]],
    entry: Entry,
    parts: Mapping[str, Tensor],
    group: ShardGroup,
    before_gather: BeforeGather,
) -> dict[str, Tensor]:
    """Add an expert's parts to `stacks`. Return the completed HF tensors, on the first rank of `group` only.

    Collective over the expert-parallel `group`: a gather for each tensor, when the last local expert is added.
    """
    out = {}
    for name, part in parts.items():
        expert_parts = stacks.setdefault(name, [])
        expert_parts.append(part.clone())  # a view would keep the whole bucket in memory
        if len(expert_parts) < entry.rule.experts // group.size:
            continue
        stacked = torch.stack(stacks.pop(name))
        if received := [stacked] if group.group is None else _gather(stacked, group, before_gather):
            out[name] = torch.cat(received)
    return out


def _gathered(
    weights: Iterable[_Weight],
    group: ShardGroup,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    before_gather: BeforeGather,
) -> Iterator[tuple[Entry, list[Tensor]]]:
    """Yield (entry, shards from all ranks in `group`) on the group's rank 0. A replicated weight has one shard.

    Shards with equal dtypes share a bucket and thus a gather, because thousands of small gathers would add latency.
    """
    bucket: list[tuple[Entry, Tensor]] = []
    nbytes = 0
    for weight in weights:
        entry, shard = weight.entry, weight.exported(dtype)
        if group.group is None or entry.op.replicated:
            if group.rank == 0:
                yield entry, [shard]
            continue
        if bucket and (nbytes + shard.nbytes > bucket_bytes or bucket[0][1].dtype != shard.dtype):
            yield from _gather_bucket(bucket, group, before_gather)
            bucket, nbytes = [], 0
        bucket.append((entry, shard))
        nbytes += shard.nbytes
    if bucket:
        yield from _gather_bucket(bucket, group, before_gather)


def _gather(tensor: Tensor, group: ShardGroup, before_gather: BeforeGather) -> list[Tensor]:
    """Return every rank's tensor on the group's rank 0, and an empty list on the other ranks."""
    if before_gather is not None:
        before_gather(group)
    received = [torch.empty_like(tensor) for _ in range(group.size)] if group.rank == 0 else None
    dist.gather(tensor, received, group=group.group, group_dst=0)
    return received or []


def _gather_bucket(
    bucket: Sequence[tuple[Entry, Tensor]], group: ShardGroup, before_gather: BeforeGather
) -> Iterator[tuple[Entry, list[Tensor]]]:
    """Gather all shards in a bucket with one collective; yield them by entry on the group's rank 0."""
    received = _gather(torch.cat([shard.reshape(-1) for _, shard in bucket]), group, before_gather)
    if not received:
        return
    sizes = [shard.numel() for _, shard in bucket]
    by_entry = zip(*(buffer.split(sizes) for buffer in received), strict=True)
    for (entry, shard), rank_parts in zip(bucket, by_entry, strict=True):
        yield entry, [part.view(shard.shape) for part in rank_parts]


def save_hf(
    model_chunks: Sequence[nn.Module],
    directory: str | Path,
    template_dir: str | Path,
    dtype: torch.dtype | None = None,
    config: HFModelConfig | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    ranks: ParallelRanks | None = None,
    quantization: Quantization | None = None,
    observe: Callable[[str, Tensor], None] | None = None,
    durable: bool = True,
) -> None:
    """Write a complete HF directory that transformers and the engines load. Collective over all ranks.

    Every source rank (see `export_weights`) writes separate files, so all ranks must share the storage of `directory`.
    Config, tokenizer and generation config come from `template_dir`. Once all files are complete, one rename
    creates the directory before any rank returns.

    dtype: None keeps the parameters' dtype.
    quantization: as in `export_weights`.
    observe: called with each tensor that this rank writes.
    durable: whether all files are on disk before the rename. False if they may be lost when the machine fails.

    Collectives: `export_weights` gathers, and all ranks synchronize three times. No rank waits for a disk in a
    collective. The other ranks wait as long as the disk accepts bytes, and at most the `Ranks()` timeout once it stops.

    An error on any rank is raised on every rank, and no files remain. Raises `OSError`, and `ModelError` for too little
    disk space, an existing directory without `overwrite`, or values that overflow.
    """
    config = config or read_hf_config(template_dir)
    ranks = ranks or ParallelRanks.current()
    directory = Path(directory)
    everyone = Ranks()
    stored = dtype or next(weight.dtype for _, weight in named_weights(model_chunks))
    expected = {name: TensorInfo(stored, shape) for name, shape in WeightMap(config).hf_tensors().items()}
    if quantization == "fp8_block":
        expected = fp8.quantized_info(expected)

    turns = Turns(everyone, f"writes to {directory}")

    def write(staging: Path) -> list[Part]:
        exported = export_weights(model_chunks, config, dtype, DEFAULT_BUCKET_BYTES, ranks, quantization, turns)
        return write_parts(staging, exported, everyone, shard_bytes, observe=observe, durable=durable)

    def complete(staging: Path, parts: list[Part]) -> None:
        assemble(staging, parts)
        stored_config = fp8.quantization_config(config) if quantization == "fp8_block" else None
        copy_metadata(template_dir, staging, stored, stored_config)

    write_staged(directory, expected, everyone, write=write, complete=complete, overwrite=overwrite, durable=durable)


def write_parts(
    staging: Path,
    exported: Iterable[tuple[str, Tensor]],
    everyone: Ranks,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    *,
    pack: Callable[[str, Tensor], Mapping[str, Tensor]] = lambda name, tensor: {name: tensor},
    observe: Callable[[str, Tensor], None] | None = None,
    durable: bool = True,
) -> list[Part]:
    """Pack each tensor of this rank with `pack`, and write the results to files in `staging`.

    `observe` is called with each tensor before `pack`. Errors are raised only after `exported` is exhausted, because
    iterating over it is collective. Raises `ModelError` for values that overflow in fp16 or are not finite in fp32.
    """
    failure = None
    with PartWriter(staging, f"{everyone.rank:05d}", shard_bytes, everyone.alive, durable=durable) as writer:
        for name, tensor in exported:
            if failure is None:
                try:
                    if problem := export_problem(name, tensor):
                        raise ModelError(str(staging), [problem])
                    if observe is not None:
                        observe(name, tensor)
                    for key, packed in pack(name, tensor).items():
                        writer.add(key, packed)
                except Exception as error:  # the loop continues, because the other ranks wait for this rank
                    failure = error
        if failure is not None:
            raise failure
        return writer.close()
