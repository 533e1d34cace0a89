"""Converts a Megatron checkpoint, or another Hugging Face directory, to a complete Hugging Face directory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dppo_megatron.hf import Entry, ModelError, WeightMap, fp8, open_weights, read_hf_config
from dppo_megatron.hf.safetensors_file import SafetensorsFile, TensorInfo
from dppo_megatron.hf.safetensors_writer import DEFAULT_SHARD_BYTES, Part, copy_metadata, shard_names, write_index
from dppo_megatron.hf.text_model import TextWeights, read_text_config
from dppo_megatron.hf.weight_source import cast_problem, source_problems

from .files import fingerprint_of


class ToHF:
    """Converts to a Hugging Face directory; a `Conversion` (see `job`).

    Files have whole weights and at most `shard_bytes`, but at least one weight. `template` has config.json and
    tokenizer. `dtype` None keeps each tensor's dtype, or bf16 for FP8. `quantization` "fp8_block" stores the
    projections as block-scaled FP8. If the model has vision, only the text model is converted (see `hf.text_model`).
    Raises `ModelError` listing every missing, misshaped and unexpected weight.
    """

    def __init__(
        self,
        source: Path,
        destination: Path,
        template: Path,
        dtype: torch.dtype | None = None,
        quantization: str | None = None,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
    ):
        self.source, self.destination = source, destination
        text = read_text_config(template)
        self.config = text or read_hf_config(template)
        self._template = template
        self._dtype = dtype
        self._quantization = quantization
        self._shard_bytes = shard_bytes
        self._map = WeightMap(self.config)
        self._weights = open_weights(source, self.config, dequantized=dtype or torch.bfloat16)
        if text is not None:
            self._weights = TextWeights(self._weights)
        problems = source_problems(self._map, self._weights)
        if quantization and any(entry.stacks_experts for entry in self._map.entries()):
            problems.append(f"quantization = {quantization}: not available for experts that share a tensor; omit it")
        if problems:
            raise ModelError(str(source), problems)
        self._groups = self._group_entries()
        self.shards = shard_names(len(self._groups))

    @property
    def nbytes(self) -> int:
        entries = itertools.chain(*self._groups)
        return sum(info.nbytes for entry in entries for info in self._written_info(entry).values())

    def fingerprint(self) -> dict[str, Any]:
        return {
            "source": fingerprint_of(self.source),
            "template": fingerprint_of(self._template),
            "dtype": str(self._dtype),
            "quantization": self._quantization,
            "shard_bytes": self._shard_bytes,
        }

    def write_shard(self, index: int, path: Path, tick: Callable[[], None]) -> dict[str, Any]:
        """Write a file. Raises `ModelError` naming every tensor in the file that overflows or is not finite."""
        announced = {name: info for entry in self._groups[index] for name, info in self._written_info(entry).items()}
        not_finite = []
        with SafetensorsFile(path, announced) as file:
            for entry in self._groups[index]:
                tensors = {name: self._cast(name, info) for name, info in self._plain_info(entry).items()}
                if problem := cast_problem(entry, map(self._weights.tensor, tensors), tensors.values()):
                    not_finite.append(problem)
                    continue
                written = fp8.quantize_projections(tensors.items()) if self._quantization else tensors.items()
                for name, tensor in written:
                    file.write(name, tensor)
                    tick()
                del tensors, written, tensor
                self._weights.release()
            if not_finite:
                raise ModelError(str(self.source), not_finite)
        return {"names": list(announced), "nbytes": sum(info.nbytes for info in announced.values())}

    def finish(self, staging: Path, records: list[dict[str, Any]]) -> None:
        parts = zip(self.shards, records, strict=True)
        write_index(staging, [Part(file, tuple(record["names"]), record["nbytes"]) for file, record in parts])
        quantization = fp8.quantization_config(self.config) if self._quantization else None
        copy_metadata(self._template, staging, self._main_dtype(), quantization, self.config.raw)

    def table(self) -> Iterator[str]:
        """Yield a line for each HF tensor with the Megatron tensor and the file."""
        for file, group in zip(self.shards, self._groups, strict=True):
            for entry in group:
                for name, info in self._written_info(entry).items():
                    dtype = str(info.dtype).removeprefix("torch.")
                    yield f"{entry.megatron} -> {name} {list(info.shape)} {dtype} in {file}"

    def _main_dtype(self) -> torch.dtype:
        """Return the dtype for config.json: the dtype with the most bytes before quantization."""
        sizes: Counter[torch.dtype] = Counter()
        for entry in itertools.chain(*self._groups):
            for info in self._plain_info(entry).values():
                sizes[info.dtype] += info.nbytes
        return sizes.most_common(1)[0][0]

    def _group_entries(self) -> list[list[Entry]]:
        """Divide the entries into files, in order. A fused weight is read as a whole, so it stays in one file."""
        groups: list[list[Entry]] = []
        filled = 0
        for entry in self._map.entries():
            if entry.rule.duplicate or (entry.stacks_experts and entry.expert):
                continue
            size = sum(info.nbytes for info in self._written_info(entry).values())
            if not groups or filled + size > self._shard_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(entry)
            filled += size
        return groups

    def _cast(self, name: str, info: TensorInfo) -> torch.Tensor:
        tensor = self._weights.tensor(name)
        # Quantize from the source's dtype, because an earlier cast would add to the error.
        return tensor if self._quantization and fp8.is_quantized(name) else tensor.to(info.dtype)

    def _written_info(self, entry: Entry) -> dict[str, TensorInfo]:
        plain = self._plain_info(entry)
        return fp8.quantized_info(plain) if self._quantization else plain

    def _plain_info(self, entry: Entry) -> dict[str, TensorInfo]:
        cast = None if entry.rule.keep_dtype else self._dtype
        infos = {t.name: self._weights.tensors[t.name] for t in entry.hf}
        return {name: TensorInfo(cast or info.dtype, info.shape) for name, info in infos.items()}
