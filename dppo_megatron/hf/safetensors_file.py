"""Writes a safetensors file tensor by tensor. The header is known first, so no tensor waits in memory.

`safetensors.torch.save_file` needs all tensors at once (https://github.com/safetensors/safetensors/issues/291). It also
makes numpy views of CPU tensors. PyTorch can then no longer free a live parameter's storage, as offloading does.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dppo_megatron.common.files import SteadyFile

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Describes a tensor by dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def info_of(tensor: Tensor) -> TensorInfo:
    """Return dtype and shape of `tensor`."""
    return TensorInfo(tensor.dtype, tuple(tensor.shape))


class SafetensorsFile:
    """Writes `tensors` to `path`, in any order, directly to their offsets in the file.

    `moved` is called after each flushed part. With `durable` every byte is on disk on exit. Raises `ValueError` for a
    tensor with a different dtype or shape than in `tensors`, and on exit for a tensor that was not written.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, TensorInfo],
        moved: Callable[[], None] = lambda: None,
        *,
        durable: bool = True,
    ):
        self._missing = dict(tensors)
        # The widest dtypes come first. Readers view the bytes, and a view must start at a multiple of the item size.
        ordered = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
        # Readers refuse files without this format tag.
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._start: dict[str, int] = {}
        end = 0
        for name in ordered:
            info = tensors[name]
            self._start[name], end = end, end + info.nbytes
            header[name] = {
                "dtype": _NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [self._start[name], end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._base = 8 + len(text)
        self._file = SteadyFile(path, moved, durable=durable)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor. A contiguous CPU tensor is not copied."""
        expected = self._missing.pop(name, None)
        if expected != info_of(tensor):
            raise ValueError(f"{name}: {info_of(tensor)}, expected {expected}")
        self._file.seek(self._base + self._start[name])
        self._file.write(bytes_of(tensor))

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        with self._file:
            if kind is not None:
                return
            if self._missing:
                raise ValueError(f"{self._file.name}: never written: {', '.join(self._missing)}")
            self._file.close()  # flushes: the file may be renamed afterwards


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in row order. A contiguous CPU tensor is not copied."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    # A numpy view would make a live parameter's storage unfit for `Actor.offloaded` on a CPU.
    raw: Any = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    raw.owner = flat
    return memoryview(raw)
