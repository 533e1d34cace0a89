"""Opens weights in every supported file format by HF name, and checks names, shapes and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .fp8 import Fp8Weights
from .hf_config import HFModelConfig
from .mxfp4 import METHOD, Mxfp4Weights
from .rules import Entry
from .safetensors_file import TensorInfo
from .safetensors_reader import SafetensorsDirectory
from .torch_dist_place import is_torch_dist
from .weight_map import WeightMap

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_NOT_FINITE = "contains values that are not finite"


class WeightSource(Protocol):
    """Provides tensors by HF name, read on demand."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return dtype and shape by name, without reading tensors."""

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. It may be a view of a mapped file."""

    def release(self) -> None:
        """Free mapped pages, except a few MB, once the tensors returned so far are deleted."""


def open_weights(
    directory: str | Path, config: HFModelConfig, dequantized: torch.dtype = torch.float32
) -> WeightSource:
    """Open a Megatron checkpoint, or a quantized or plain HF directory, as weights with HF names.

    `dequantized` is the dtype for FP8 and MXFP4 weights.

    Raises `ModelError` for files that cannot be read, an unsupported quantization, and a Megatron checkpoint from
    another model.
    """
    if is_torch_dist(directory):
        from .torch_dist_reader import TorchDistWeights  # importing torch.distributed.checkpoint takes a second

        return TorchDistWeights(directory, config)
    plain = SafetensorsDirectory(directory)
    if config.quantization is not None and config.quantization.get("quant_method") == METHOD:
        return Mxfp4Weights(plain, dequantized)
    return plain if config.quantization is None else Fp8Weights(plain, config, dequantized)


def source_problems(weight_map: WeightMap, source: WeightSource) -> list[str]:
    """List every missing, misshaped and unexpected tensor, and a stored tied head that differs, one line each."""
    out = header_problems(weight_map, source)
    # Some writers store the tied head too. A different head must not be dropped silently.
    stored_twice = weight_map.config.tied_embeddings and {_HEAD, _EMBEDDING} <= source.tensors.keys()
    if stored_twice and not torch.equal(source.tensor(_HEAD), source.tensor(_EMBEDDING)):
        out.append(f"{_HEAD}: differs from {_EMBEDDING} although tie_word_embeddings is true")
    return out


def header_problems(weight_map: WeightMap, source: WeightSource) -> list[str]:
    """List the `source_problems` that can be found without reading a tensor."""
    tied = weight_map.config.tied_embeddings

    def may_be_there(name: str) -> bool:
        return weight_map.is_ignored(name) or (tied and name == _HEAD)

    return shape_problems(weight_map.hf_tensors(), source.tensors, may_be_there)


def shape_problems(
    expected: Mapping[str, tuple[int, ...]],
    actual: Mapping[str, TensorInfo],
    may_be_there: Callable[[str], bool] = lambda name: False,
) -> list[str]:
    """List every missing, unexpected or misshaped tensor, and every integer tensor, one line each."""
    out = []
    for name, shape in expected.items():
        if name not in actual:
            out.append(f"{name}: missing, expected shape {shape}")
        elif actual[name].shape != shape:
            out.append(f"{name}: shape {actual[name].shape}, expected {shape}")
        elif not actual[name].dtype.is_floating_point:
            out.append(f"{name}: {actual[name].dtype}, expected floating-point numbers")
    unexpected = (name for name in actual if name not in expected and not may_be_there(name))
    return out + [f"{name}: unexpected, shape {actual[name].shape}" for name in unexpected]


def all_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite. Only minimum and maximum are checked, which needs no large temporary."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


def overflow_problem(*names: str) -> str:
    """Describe tensors with values that a cast to fp16 makes infinite."""
    remedy = "use bf16 (model.dtype, engine.dtype or --dtype)"
    return f"{', '.join(names)}: contains values beyond 65504, the largest of fp16; {remedy}"


def cast_problem(entry: Entry, sources: Iterable[Tensor], results: Iterable[Tensor]) -> str | None:
    """Return why a cast weight must not be stored, or None if it may be stored."""
    if all(map(all_finite, results)):
        return None
    names = [t.name for t in entry.hf]
    return overflow_problem(*names) if all(map(all_finite, sources)) else f"{', '.join(names)}: {_NOT_FINITE}"


def export_problem(name: str, tensor: Tensor) -> str | None:
    """Return why `tensor` must not be published, or None if it may be published.

    Values must not overflow in fp16 and must be finite in fp32, such as the scales of FP8 values.
    """
    if tensor.dtype not in (torch.float16, torch.float32) or all_finite(tensor):
        return None
    return overflow_problem(name) if tensor.dtype == torch.float16 else f"{name}: {_NOT_FINITE}"
