"""Reads Megatron's torch_dist checkpoints, saved in any layout, as Hugging Face tensors.

`torch.distributed.checkpoint.load` fills tensors that must all be allocated beforehand
(https://docs.pytorch.org/docs/stable/distributed.checkpoint.html), and Megatron's `dist_checkpointing.load` also needs
the model with its process groups. This reader reads the metadata and maps each tensor from disk on demand. So a
conversion needs memory for one weight and no process group.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from dppo_megatron.common.files import read_json
from dppo_megatron.errors import shown

from .checkpoint_keys import StoredAt, possible_locations
from .errors import ModelError
from .hf_config import HFModelConfig
from .megatron_model import ADAPTER
from .parse_config import read_hf_config
from .rules import Entry
from .safetensors_file import TensorInfo
from .torch_dist_metadata import read_metadata
from .torch_dist_place import MODEL
from .weight_map import WeightMap

_SKIPPED = "optimizer."
_RUN, _RUN_FIELD = "run.json", "model.path config.json "  # record that a training run stores in a checkpoint


class TorchDistWeights:
    """Reads checkpoint weights by HF name, without optimizer state; a `WeightSource`.

    Tensors have the dtype they were saved in. Raises `ModelError` listing missing, misshaped and unexpected weights,
    recorded fields that differ from `config`, and absent or truncated files.
    """

    def __init__(self, directory: str | Path, config: HFModelConfig):
        self.directory = Path(directory)
        self._config = config
        self._map = WeightMap(config)
        self._files: dict[str, mmap.mmap] = {}
        metadata = read_metadata(self.directory)
        self._storage = metadata.storage_data
        self._stored = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        self._chunks: dict[str, dict[tuple[int, ...], list[int]]] = {}
        self._entries: dict[str, Entry] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._last: tuple[Entry, dict[str, Tensor]] | None = None
        if any(f".{ADAPTER}." in key for key in self._stored):
            problem = "contains only adapters (model.lora); use the model or the adapter that its run ends with"
            raise ModelError(str(directory), [problem])
        problems = (
            recorded_differences(self.directory, config) + self._locate() + self._unknown() + self._file_problems()
        )
        if problems:
            raise ModelError(str(directory), problems)

    def tensor(self, name: str) -> Tensor:
        """Return an HF tensor on the CPU. The other parts of a fused weight are kept for the next calls.

        Raises `ModelError` if the stored chunks do not make up the tensor.
        """
        entry = self._entries[name]
        if entry.stacks_experts and entry.layer is not None:
            expert_entries = [e for e in self._map.layer_entries(entry.layer) if e.hf[0].name == name]
            return torch.stack([self._map.to_hf(e, self._whole(e))[name] for e in expert_entries])
        if self._last is None or self._last[0] is not entry:
            self._last = None  # frees the old tensors before the next are read
            self._last = entry, self._map.to_hf(entry, self._whole(entry))
        return self._last[1][name]

    def release(self) -> None:
        self._last = None
        for mapped in self._files.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _locate(self) -> list[str]:
        problems = []
        self._at: dict[str, StoredAt] = {}
        for entry in self._map.entries():
            if entry.rule.duplicate:
                continue
            at = next((at for at in self._locations(entry) if at.key in self._stored), None)
            if at is None:
                problems.append(f"{entry.megatron}: missing")
                continue
            stored = self._stored[at.key]
            if (stack_shape := tuple(stored.size[: len(at.stacked)])) != at.stacked:
                problems.append(f"{at.key}: stacks {stack_shape}, config.json has {at.stacked} layers or experts")
                continue
            self._at[entry.megatron] = at
            shape = torch.Size(stored.size[len(at.stacked) :])
            try:
                parts = self._map.to_hf(entry, torch.empty(shape, device="meta"))
            except ModelError as error:
                problems += [f"{at.key}: {problem}" for problem in error.problems]
                continue
            for name, part in parts.items():
                self._entries[name] = entry
                experts = (entry.rule.experts,) if entry.stacks_experts else ()
                self.tensors[name] = TensorInfo(stored.properties.dtype, (*experts, *part.shape))
        return problems

    def _locations(self, entry: Entry) -> list[StoredAt]:
        return [
            at for stacked in (True, False) for at in possible_locations(entry, self._config, layers_stacked=stacked)
        ]

    def _unknown(self) -> list[str]:
        """List weights that this model does not have."""
        expected_keys = {at.key for entry in self._map.entries() for at in self._locations(entry)}
        unknown = [key for key in self._stored if key not in expected_keys and not key.startswith(_SKIPPED)]
        return [f"{key}: unexpected, shape {tuple(self._stored[key].size)}" for key in unknown]

    def _file_problems(self) -> list[str]:
        ends: dict[str, int] = {}
        for stored in self._storage.values():
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
        problems = []
        for file, end in sorted(ends.items()):
            path = self.directory / file
            if not path.is_file():
                problems.append(f"{file}: absent, the checkpoint's metadata places tensors there")
            elif path.stat().st_size < end:
                problems.append(f"{file}: truncated ({path.stat().st_size} bytes, its tensors end at {end})")
        return problems

    def _whole(self, entry: Entry) -> Tensor:
        """Assemble an entry's global Megatron tensor from the stored chunks."""
        at = self._at[entry.megatron]
        stored = self._stored[at.key]
        depth = len(at.index)
        shape = torch.Size(stored.size[depth:])
        out: Tensor | None = None
        filled = 0
        for number in self._chunks_at(at):
            chunk = stored.chunks[number]
            tensor = self._chunk(MetadataIndex(at.key, chunk.offsets, number))
            for axis_index, offset in zip(at.index, chunk.offsets, strict=False):
                tensor = tensor[axis_index - offset]
            if tensor.shape == shape:
                return tensor
            out = torch.empty(shape, dtype=tensor.dtype) if out is None else out
            region = tuple(slice(o, o + s) for o, s in zip(chunk.offsets[depth:], chunk.sizes[depth:], strict=True))
            out[region] = tensor
            filled += tensor.numel()
        if out is None or filled != out.numel():
            raise ModelError(str(self.directory), [f"{at.key}: its chunks do not make up shape {tuple(shape)}"])
        return out

    def _chunks_at(self, at: StoredAt) -> list[int]:
        """Return a weight's chunk numbers from a cached index: an expert stack has tens of thousands of chunks."""
        if at.key not in self._chunks:
            depth, chunk_numbers = len(at.index), self._chunks.setdefault(at.key, {})
            for number, chunk in enumerate(self._stored[at.key].chunks):
                spans = (range(o, o + s) for o, s in zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True))
                for index in itertools.product(*spans):
                    chunk_numbers.setdefault(index, []).append(number)
        return self._chunks[at.key].get(at.index, [])

    def _chunk(self, index: MetadataIndex) -> Tensor:
        """Return a stored chunk as a view of the mapped file, or as a copy if the bytes are not aligned."""
        stored = self._storage[index]
        mapped = self._mapped(stored.relative_path)
        # torch.save wrote shape, strides and byte offset into a small zip archive.
        with (self.directory / stored.relative_path).open("rb") as file, FakeTensorMode():
            view: Any = _create_file_view(file, stored.offset, stored.length)
            fake = torch.load(view, weights_only=True)
        bytes_at = stored.offset + fake.untyped_storage()._checkpoint_offset
        size = fake.untyped_storage().nbytes()
        if bytes_at % fake.dtype.itemsize:
            raw = torch.frombuffer(bytearray(mapped[bytes_at : bytes_at + size]), dtype=torch.uint8)
        else:
            raw = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=bytes_at)
        return raw.view(fake.dtype).as_strided(fake.shape, fake.stride(), fake.storage_offset())

    def _mapped(self, file: str) -> mmap.mmap:
        if file not in self._files:
            with (self.directory / file).open("rb") as opened:
                self._files[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._files[file]


def recorded_differences(directory: Path, config: HFModelConfig) -> list[str]:
    """List model fields that differ between the checkpoint's record and `config`; shapes do not show all of them."""
    expected = config.identity()
    record: Mapping[str, Any] = {}
    if (directory / MODEL).is_dir():
        record = read_hf_config(directory / MODEL).identity()
    elif (directory / _RUN).is_file():
        saved = (read_json(directory / _RUN) or {}).get("run", {})
        if not isinstance(saved, dict):
            raise ModelError(str(directory), [f"{_RUN}: run is {shown(saved)}, not the settings of a run"])
        record = {name.removeprefix(_RUN_FIELD): value for name, value in saved.items()}
    return [
        f"{name} = {record[name]!r} in the checkpoint, {expected[name]!r} in {config.source}"
        for name in expected
        if name in record and record[name] != expected[name]
    ]
