"""List the number formats with their names in configs, torch, servers and safetensors. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

FloatName = Literal["fp32", "bf16", "fp16"]
"""Formats that weights can be cast to, as configs and options spell them."""


@dataclass(frozen=True, slots=True)
class Dtype:
    long: str  # the name in torch, vLLM, SGLang and a config.json
    safetensors: str
    bytes: int

    @property
    def torch(self) -> torch.dtype:
        import torch

        return getattr(torch, self.long)


DTYPES: dict[str, Dtype] = {
    "fp32": Dtype("float32", "F32", 4),
    "bf16": Dtype("bfloat16", "BF16", 2),
    "fp16": Dtype("float16", "F16", 2),
    "fp8": Dtype("float8_e4m3fn", "F8_E4M3", 1),
}
