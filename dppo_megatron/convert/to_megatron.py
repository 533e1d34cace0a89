"""Converts a Hugging Face directory (FP8 too) to a Megatron torch_dist checkpoint, weight by weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dppo_megatron.common.files import adapter
from dppo_megatron.hf import Entry, ModelError, WeightMap, open_weights, read_hf_config
from dppo_megatron.hf.checkpoint_keys import StoredAt, possible_locations, stacks_layers
from dppo_megatron.hf.safetensors_writer import copy_metadata
from dppo_megatron.hf.torch_dist_place import MODEL
from dppo_megatron.hf.torch_dist_writer import Chunk, TorchDistFile, write_torch_dist_metadata
from dppo_megatron.hf.weight_source import cast_problem, source_problems

from .files import find_checkpoint, fingerprint_of
from .layout import SourceRank, TargetLayout

_OVERHEAD = 4096  # bytes of a stored tensor's archive and metadata


class ToMegatron:
    """Converts to a file for each source rank in `layout`; a `Conversion` (see `job`).

    `dtype` None keeps each tensor's dtype, or bf16 for FP8. Raises `ModelError` listing every size that does not
    divide, or every missing, unexpected and misshaped tensor.
    """

    def __init__(self, source: Path, destination: Path, layout: TargetLayout, dtype: torch.dtype | None = None):
        self.source, self.destination = source, destination
        if checkpoint := find_checkpoint(source):
            raise ModelError(
                str(source),
                [f"a Megatron checkpoint, not a Hugging Face directory; `megatron-to-hf {checkpoint}` converts it"],
            )
        self.config = read_hf_config(source)
        self.layout = layout
        self._dtype = dtype
        self._map = WeightMap(self.config)
        if problems := layout.problems(self.config):
            raise ModelError(f"layout for {source}", problems)
        self._weights = open_weights(source, self.config, dequantized=dtype or torch.bfloat16)
        if problems := source_problems(self._map, self._weights):
            raise ModelError(str(source), problems)
        self._layers_stacked = stacks_layers(self.config)
        self._ranks = layout.source_ranks(self.config)
        self.shards = [f"__{index}_0.distcp" for index in range(len(self._ranks))]

    @property
    def nbytes(self) -> int:
        return sum(
            self._stored_dtype(entry, t.name).itemsize * math.prod(t.shape[entry.stacks_experts :]) + _OVERHEAD
            for entry in self._map.entries()
            if not entry.rule.duplicate
            for t in entry.hf
        )

    def fingerprint(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "source": fingerprint_of(self.source),
            "layout": [layout.tensor, layout.pipeline, layout.expert, layout.expert_tensor_size],
            "dtype": str(self._dtype),
        }

    def write_shard(self, index: int, path: Path, tick: Callable[[], None]) -> dict[str, Any]:
        """Write a rank's file. Raises `ModelError` naming every tensor in the file that overflows or is not finite."""
        not_finite = []
        with TorchDistFile(path) as file:
            for entry in self._map.entries():
                shard = self._ranks[index].shard_of(entry, self.config)
                if shard is None:
                    continue
                parts = [self._weights.tensor(t.name) for t in entry.hf]
                for piece in entry.op.pieces(parts, *shard):
                    tensor = piece.tensor.to(self._stored_dtype(entry, entry.hf[0].name)).contiguous()
                    if problem := cast_problem(entry, [piece.tensor], [tensor]):
                        not_finite.append(problem)
                    file.write(self._locations(entry), self._shape(entry), replace(piece, tensor=tensor))
                    tick()
                del parts
                self._weights.release()
            if not_finite:
                raise ModelError(str(self.source), not_finite)
        return {"chunks": [asdict(chunk) for chunk in file.chunks]}

    def finish(self, staging: Path, records: list[dict[str, Any]]) -> None:
        chunks = [adapter(Chunk).validate_python(chunk) for record in records for chunk in record["chunks"]]
        (staging / MODEL).mkdir(exist_ok=True)
        dtype = self._dtype or (torch.bfloat16 if self.config.quantization else None)
        copy_metadata(self.source, staging / MODEL, dtype)
        write_torch_dist_metadata(staging, chunks)

    def table(self) -> Iterator[str]:
        """Yield a line for each HF tensor with the Megatron tensor and the file."""
        for entry in self._map.entries():
            if entry.rule.duplicate:
                continue
            location = self._locations(entry)[0]
            index = "".join(f"[{i}]" for i in location.index)
            files = [f for f, source in zip(self.shards, self._ranks, strict=True) if self._writes(entry, source)]
            where = files[0] if len(files) == 1 else f"{files[0]} .. {files[-1]} ({len(files)} shards)"
            target = f"{location.key}{index} {list(self._shape(entry))}"
            for part in entry.hf:
                stored = self._weights.tensors[part.name].dtype
                change = _short(stored, self._stored_dtype(entry, part.name))
                yield f"{part.name} {list(part.shape)} {change} -> {target} in {where}"

    def _locations(self, entry: Entry) -> list[StoredAt]:
        return possible_locations(entry, self.config, layers_stacked=self._layers_stacked)

    def _shape(self, entry: Entry) -> tuple[int, ...]:
        """Return the whole Megatron tensor's shape, for one layer and expert."""
        parts = {t.name: torch.empty(t.shape, device="meta") for t in entry.hf}
        return tuple(self._map.to_megatron(entry, parts).shape)

    def _writes(self, entry: Entry, source: SourceRank) -> bool:
        shard = source.shard_of(entry, self.config)
        return shard is not None and (shard[0] == 0 or not entry.op.replicated)

    def _stored_dtype(self, entry: Entry, name: str) -> torch.dtype:
        dtype = self._weights.tensors[name].dtype
        return dtype if self._dtype is None or entry.rule.keep_dtype else self._dtype


def _short(source_dtype: torch.dtype, target_dtype: torch.dtype) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in (source_dtype, target_dtype)]
    return names[0] if source_dtype == target_dtype else " as ".join(names)
