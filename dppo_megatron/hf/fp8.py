"""Stores block-scaled FP8 weights in DeepSeek-V3's file layout, which vLLM, SGLang and transformers load.

A quantized `x.weight` [R, C] is e4m3. The scales `x.weight_scale_inv` [ceil(R / 128), ceil(C / 128)], fp32, multiply
each 128 x 128 block: a weight [300, 256] has scales [3, 2]. Only layer projections are quantized. Embeddings, head,
norms, routers and biases keep their dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import ModelError
from .hf_config import HFModelConfig
from .safetensors_file import TensorInfo
from .safetensors_reader import SafetensorsDirectory

BLOCK = 128
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
_SUFFIX = "_scale_inv"
# Gated delta net keeps its dtype. Readers fuse some of its projections with others that are too small for a block.
_PROJECTION = re.compile(r"model\.layers\.\d+\.(?!linear_attn\.).*proj(_with_mqa)?\.weight")
_DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "out_proj")


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `weight` [R, C] as e4m3 [R, C], and inverse scales [ceil(R / 128), ceil(C / 128)] in fp32.

    In each block the largest magnitude becomes 448, and every value is rounded to the nearest e4m3 value. An all-zero
    block gets scale 1. Raises `ValueError` for values that are not finite.
    """
    rows, columns = weight.shape
    scales = torch.empty(_grid((rows, columns), (BLOCK, BLOCK)), device=weight.device)
    out = torch.empty(rows, columns, dtype=E4M3, device=weight.device)
    bands = zip(weight.split(BLOCK), out.split(BLOCK), scales, strict=True)  # by band, for small fp32 copies
    for band, band_out, band_scales in bands:
        blocks = torch.nn.functional.pad(band.float(), (0, -columns % BLOCK)).view(band.shape[0], -1, BLOCK)
        largest = blocks.abs().amax(dim=(0, 2))
        # Below the smallest normal number a scale would lose digits, or become 0 and the values infinite.
        scale = (largest / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny).masked_fill_(largest == 0, 1.0)
        scaled = blocks / scale[:, None]  # the largest is 448 up to rounding, which the cast removes
        band_out.copy_(scaled.view(band.shape[0], -1)[:, :columns])
        band_scales.copy_(scale)
    if not torch.isfinite(scales).all():
        raise ValueError("contains values that are not finite")
    return out, scales


def dequantize(
    weight: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16, block: tuple[int, int] = (BLOCK, BLOCK)
) -> Tensor:
    """Multiply e4m3 `weight` [R, C] by `scale_inv` in fp32, and return the values [R, C] cast to `dtype`."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    for index, scales in enumerate(scale_inv.float()):
        band = slice(index * block[0], (index + 1) * block[0])
        out[band] = weight[band].float() * scales.repeat_interleave(block[1])[:columns]
    return out


def is_quantized(name: str) -> bool:
    """Return whether an FP8 export quantizes the HF tensor `name`."""
    return _PROJECTION.fullmatch(name) is not None


def quantize_projections(
    tensors: Iterable[tuple[str, Tensor]], *, emulated: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, with each projection as an e4m3 weight followed by the scales.

    With `emulated` each projection is the e4m3 weight times the scales, in the projection's dtype. Raises `ModelError`
    naming every tensor that is not finite. It is raised only after `tensors` is exhausted, because iterating over
    `tensors` may be collective.
    """
    problems = []
    for name, tensor in tensors:
        if not is_quantized(name):
            yield name, tensor
            continue
        try:
            weight, scale = quantize(tensor)
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        if emulated:
            yield name, dequantize(weight, scale, tensor.dtype)
            continue
        yield name, weight
        yield name + _SUFFIX, scale
    if problems:
        raise ModelError("FP8 export", problems)


def quantized_info(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return dtype and shape of each tensor that `quantize_projections` yields, by name."""
    out = {}
    for name, info in tensors.items():
        if not is_quantized(name):
            out[name] = info
            continue
        out[name] = TensorInfo(E4M3, info.shape)
        out[name + _SUFFIX] = TensorInfo(torch.float32, _grid(info.shape, (BLOCK, BLOCK)))
    return out


def quantization_config(config: HFModelConfig) -> dict[str, Any]:
    """Return the config.json entry `quantization_config` for weights from `quantize_projections`."""
    layers = range(config.num_layers)
    routers = [f"model.layers.{layer}.mlp.gate" for layer in layers if config.is_moe_layer(layer)]
    if config.moe is not None and config.moe.shared_gate:
        routers += [f"{name.removesuffix('gate')}shared_expert_gate" for name in routers]
    mixing = sorted({*layers} - {*config.attention_layers})
    delta = [f"model.layers.{layer}.linear_attn.{name}" for layer in mixing for name in _DELTA_NET]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", *routers, *delta],
    }


class Fp8Weights:
    """Reads a block-scaled FP8 directory as if it were not quantized; a `WeightSource`.

    `dtype` is the dtype of dequantized tensors. Raises `ModelError` for another quantization, and lists all FP8 weights
    with missing or misshaped scales. Scales without a weight stay in `tensors`.
    """

    def __init__(self, stored: SafetensorsDirectory, config: HFModelConfig, dtype: torch.dtype = torch.float32):
        self._stored = stored
        self._block = _block_size(config)
        self.tensors: dict[str, TensorInfo] = {}
        problems = []
        for name, info in stored.tensors.items():
            if name.endswith(_SUFFIX) and name.removesuffix(_SUFFIX) in stored.tensors:
                continue
            if info.dtype != E4M3:
                self.tensors[name] = info
                continue
            self.tensors[name] = TensorInfo(dtype, info.shape)
            scale = stored.tensors.get(name + _SUFFIX)
            grid = _grid(info.shape, self._block)
            if scale is None:
                problems.append(f"{name}: FP8 without {name + _SUFFIX}")
            elif tuple(scale.shape) != grid:
                problems.append(f"{name + _SUFFIX}: shape {tuple(scale.shape)}, expected {grid}")
        if problems:
            raise ModelError(str(stored.directory), problems)

    def tensor(self, name: str) -> Tensor:
        stored = self._stored.tensor(name)
        if stored.dtype != E4M3:
            return stored
        return dequantize(stored, self._stored.tensor(name + _SUFFIX), self.tensors[name].dtype, self._block)

    def release(self) -> None:
        self._stored.release()


def _block_size(config: HFModelConfig) -> tuple[int, int]:
    settings = config.quantization or {}
    problems = []
    if settings.get("quant_method") != "fp8":
        problems.append(
            f"quantization_config.quant_method = {settings.get('quant_method')!r}: only block-scaled 'fp8' and 'mxfp4' "
            "can be read; use the full-precision weights"
        )
    if settings.get("fmt", "e4m3") != "e4m3":
        problems.append(f"quantization_config.fmt = {settings['fmt']!r}: only 'e4m3' can be read")
    size: Any = settings.get("weight_block_size")
    if not (isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        problems.append(f"quantization_config.weight_block_size = {size!r}: must be two sizes, such as [128, 128]")
    if problems:
        raise ModelError(config.source, problems)
    return size[0], size[1]


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return how many blocks cover a tensor along each dimension."""
    return tuple(-(-size // edge) for size, edge in zip(shape, block, strict=True))
