"""Exports the weights of live Megatron ranks under Hugging Face names, streamed for weight sync or to a directory."""

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
    """Yield (HF name, whole tensor) of every weight that this rank exports. Every rank must exhaust its iterator.

    A weight with an adapter is exported as W + (alpha / r) B A, one tensor at a time. The source rank of a weight is
    tensor-parallel rank 0 of its pipeline stage (and expert-parallel rank) in the first data-parallel replica. So over
    all ranks each HF tensor is yielded exactly once.
    Collectives: local shards fill buckets of at most `bucket_bytes`. Each bucket is one `gather` to the source rank in
    the tensor- or expert-tensor-parallel group of the first replica. A group of one rank has no collectives. Each rank
    of the group calls `before_gather` first, which may wait for a late source rank.

    Tensors are cast to `dtype` before gathering; None keeps each parameter's dtype. With `quantization` "fp8_block" the
    source rank quantises each whole projection and yields its scales too, as `hf.fp8` describes. With
    "fp8_block_emulated" it yields the dequantised values in the weight's dtype. Tensors are on the parameters' device
    and may be views of live parameters, so use or clone them before the next optimizer step.
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
    """Return a line for each weight whose part on this rank overflows in `dtype`. No collectives.

    Broadcasts need this check before `export_weights` sends anything. Files are checked as they are written. For fp16
    it takes one pass over all weights. Other dtypes have the range of fp32 and need no pass.
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
        try:
            entry = weight_map.entry(name)
        except KeyError as error:
            raise ModelError(weight_map.config.source, [str(error.args[0])]) from None
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
    """Yield (PEFT's name, whole tensor) of every A and B on its source rank, as `export_weights` does.

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
    # Dense weights come first. They use another group than experts, and all ranks must enter the groups in one order.
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
    """Add one expert's parts to `stacks`, and return the HF tensors that have all experts on the first rank of `group`.

    Collective over the expert-parallel `group`: one gather for each tensor, at its last local expert.
    """
    out = {}
    for name, part in parts.items():
        expert_parts = stacks.setdefault(name, [])
        expert_parts.append(part.clone())  # a view would keep its bucket
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
    """Yield (entry, shards of all ranks of `group`) on the group's rank 0.

    Shards of one dtype share a bucket and so a gather, because each of thousands of small gathers would cost latency.
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
    """Return the tensors of all ranks on the group's rank 0, and none on the other ranks."""
    if before_gather is not None:
        before_gather(group)
    received = [torch.empty_like(tensor) for _ in range(group.size)] if group.rank == 0 else None
    dist.gather(tensor, received, group=group.group, group_dst=0)
    return received or []


def _gather_bucket(
    bucket: Sequence[tuple[Entry, Tensor]], group: ShardGroup, before_gather: BeforeGather
) -> Iterator[tuple[Entry, list[Tensor]]]:
    """Gather the shards of a bucket in one collective; yield them by entry on the group's rank 0."""
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

    Every source rank (see `export_weights`) writes its own files, so `directory` must be on storage that all ranks
    share. Config, tokenizer and generation config come from `template_dir`. When all files are complete and on the
    disk, one rename creates the directory, before any rank returns. `dtype` None keeps the parameters' dtype.
    `quantization` is as in `export_weights`. `observe` is called with each tensor that this rank writes. `durable` is
    False if the files may be lost when the machine fails.

    Collectives: those of `export_weights`, and all ranks synchronise three times. No rank waits for a disk in a
    collective. The other ranks wait while the disk accepts bytes, and at most the time-out of `Ranks()` while it does
    not. An error of any rank is raised on every rank, and no files remain then. `ModelError` means too little disk
    space or an existing directory without `overwrite`. `OSError` is raised too.
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
    """Write the tensors that `pack` returns for each of this rank's tensors to files of `staging`.

    `observe` is called with each tensor before `pack`. Errors are raised only after `exported` is exhausted, because
    its iteration is collective: `ModelError` for values beyond fp16.
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
                except Exception as error:  # the loop continues, because the other ranks wait for this one
                    failure = error
        if failure is not None:
            raise failure
        return writer.close()
