"""Lazy reading of a Hugging Face safetensors directory: tensors are views of memory-mapped files."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import ModelError
from .safetensors_file import DTYPES, TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorLocation(TensorInfo):
    """Where one tensor lies. `start` and `stop` are byte offsets in the file."""

    file: Path
    start: int
    stop: int


class SafetensorsDirectory:
    """All tensors of a model directory (`model.safetensors`, or shards with an index), by name.

    Opening reads the headers only. Raises `ModelError` naming every problem: no safetensors, files the
    index names that are absent, tensors the index names that its files lack, truncated or malformed files.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._maps: dict[Path, mmap.mmap] = {}
        self._tensors: dict[str, TensorLocation] = {}
        problems: list[str] = []
        placed = self._index(problems)
        for file, wanted in placed.items():
            try:
                found = read_header(file)
            except ModelError as error:
                problems += error.problems
                continue
            names = found if wanted is None else wanted
            problems += [
                f"{name}: the index places it in {file.name}, which lacks it" for name in names if name not in found
            ]
            self._tensors.update((name, found[name]) for name in names if name in found)
        if problems:
            raise ModelError(str(self.directory), problems)

    @property
    def tensors(self) -> Mapping[str, TensorLocation]:
        return self._tensors

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU, a view of the mapped file (writing to it changes no file)."""
        at = self._tensors[name]
        if at.file not in self._maps:
            with at.file.open("rb") as opened:
                self._maps[at.file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        if at.start == at.stop:
            return torch.empty(at.shape, dtype=at.dtype)
        count = (at.stop - at.start) // at.dtype.itemsize
        return torch.frombuffer(self._maps[at.file], dtype=at.dtype, count=count, offset=at.start).view(at.shape)

    def release(self) -> None:
        """Gives back the memory of mapped pages; tensors handed out are read again where they are used again."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _index(self, problems: list[str]) -> dict[Path, list[str] | None]:
        """File -> names the index places there; None where there is no index: the file's header decides."""
        single, index = self.directory / SINGLE_FILE, self.directory / INDEX_FILE
        if single.is_file():
            return {single: None}
        if not index.is_file():
            problems.append(f"neither {SINGLE_FILE} nor {INDEX_FILE}: no weights to read")
            return {}
        try:
            weight_map = dict(json.loads(index.read_text())["weight_map"])
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            problems.append(f"{INDEX_FILE}: not a valid index: {error!r}")
            return {}
        placed: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            placed.setdefault(self.directory / file, []).append(name)
        absent = sorted(file for file in placed if not file.is_file())
        problems += [f"{file.name}: absent, the index places {len(placed.pop(file))} tensors there" for file in absent]
        return placed


def read_header(file: Path) -> dict[str, TensorLocation]:
    """Tensors of one safetensors file. Raises `ModelError` when malformed, truncated or of unknown types."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelError(str(file), [f"{file.name}: not a safetensors file, or truncated ({size} bytes)"])
        text = opened.read(length)
    try:
        header = dict(json.loads(text))
        header.pop("__metadata__", None)
        located = {name: _locate(file, 8 + length, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(str(file), [f"{file.name}: malformed header: {error!r}"]) from None
    problems = [
        f"{name}: {file.name} is truncated ({size} bytes, the tensor ends at {at.stop})"
        for name, at in located.items()
        if at.stop > size
    ]
    if problems:
        raise ModelError(str(file), problems)
    return located


def _locate(file: Path, base: int, entry: Mapping[str, Any]) -> TensorLocation:
    start, stop = (base + offset for offset in entry["data_offsets"])
    location = TensorLocation(DTYPES[entry["dtype"]], tuple(entry["shape"]), file, start, stop)
    if stop - start != location.nbytes:
        raise ValueError(f"{stop - start} bytes for shape {location.shape} of {entry['dtype']}")
    return location
