"""Reads MXFP4 weights in published gpt-oss directories as if they were not quantized. MXFP4 is never written.

A weight `name` [experts, inputs, outputs] is stored in two tensors
(https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf):

- `name`_blocks [experts, outputs, inputs / 32, 16]: two e2m1 values per byte, the first in the low half
- `name`_scales [experts, outputs, inputs / 32]: the exponent of 32 values, plus 127
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .safetensors_file import TensorInfo
from .safetensors_reader import SafetensorsDirectory

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8

METHOD = "mxfp4"  # quantization_config.quant_method
_BLOCKS, _SCALES = "_blocks", "_scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; the highest bit is the sign
_BIAS = 127


def dequantize(
    blocks: UInt8[Tensor, "*n b 16"], scales: UInt8[Tensor, "*n b"], dtype: torch.dtype
) -> Float[Tensor, "*n 32b"]:
    """Return the values in `dtype`. They are exact in bf16 and fp32 if the exponents are in range."""
    values = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    return torch.ldexp(values[pairs], scales[..., None].int() - _BIAS).to(dtype).flatten(-2)


class Mxfp4Weights:
    """Provides the tensors in an MXFP4 directory under their unquantized names; a `WeightSource`.

    `dtype` is the dtype of dequantized tensors. A tensor is absent if blocks or scales are missing.
    """

    def __init__(self, stored: SafetensorsDirectory, dtype: torch.dtype = torch.bfloat16):
        self._stored, self._dtype = stored, dtype
        self._last: tuple[str, Tensor] | None = None  # a tensor is read many times, once per expert
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in stored.tensors.items():
            weight = name.removesuffix(_BLOCKS)
            scales = stored.tensors.get(weight + _SCALES)
            if name.endswith(_BLOCKS) and scales is not None and info.shape == (*scales.shape, 16):
                experts, outputs, blocks, _ = info.shape
                self.tensors[weight] = TensorInfo(dtype, (experts, 32 * blocks, outputs))
            elif not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in stored.tensors):
                self.tensors[name] = info

    def tensor(self, name: str) -> Tensor:
        if name in self._stored.tensors:
            return self._stored.tensor(name)
        if self._last is None or self._last[0] != name:
            self._last = None
            blocks, scales = (self._stored.tensor(name + suffix) for suffix in (_BLOCKS, _SCALES))
            whole = torch.empty(self.tensors[name].shape, dtype=self._dtype)
            for out, packed, exponents in zip(whole, blocks, scales, strict=True):  # by expert, for small fp32 copies
                out.copy_(dequantize(packed, exponents, self._dtype).mT)
            self._last = name, whole
        return self._last[1]

    def release(self) -> None:
        self._stored.release()
