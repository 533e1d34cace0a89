"""List the known GPUs by name, with memory, compute capability and peak rates."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dppo_megatron.errors import ExpectedError

GIB = 1 << 30

# Total memory as torch reports it, in GiB and rounded down, and the compute capability.
_GPUS: dict[str, tuple[float, tuple[int, int]]] = {
    "a100-40": (39.3, (8, 0)),
    "a100-80": (79.1, (8, 0)),
    "l40s-48": (44.3, (8, 9)),
    "h100-80": (79.1, (9, 0)),
    "h20-96": (95.0, (9, 0)),
    "h200-141": (139.7, (9, 0)),
    "b200-192": (178.3, (10, 0)),
}
# Dense peak in TFLOP/s by NVIDIA's data sheets, in 16 bits and in FP8. The first key that the device name contains
# counts.
_PEAKS: dict[str, tuple[float, float | None]] = {
    "h100 pcie": (756.0, 1513.0), "h100 nvl": (835.5, 1671.0), "h100": (989.4, 1978.9),
    "h200 nvl": (835.5, 1671.0), "h200": (989.4, 1978.9), "h20": (148.0, 296.0), "a100": (312.0, None),
    "l40s": (362.0, 733.0), "gb200": (2500.0, 5000.0), "b200": (2250.0, 4500.0),
}  # fmt: skip
# Assumed sizes: CUDA context and cuBLAS workspaces, and NCCL buffers for a rank's communicators.
CONTEXT_BYTES = 1 * GIB
NCCL_BYTES = 2 * GIB
MARGIN = 0.05  # memory share for allocator fragmentation and for sequences longer than planned


class UnknownHardware(ExpectedError, ValueError):
    """The name is neither a GPU in the table nor `cpu-GIB`."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Describes a device. `capability` is None for a CPU."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None

    @property
    def cuda(self) -> bool:
        return self.capability is not None

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that libraries and communicators take before the first tensor."""
        return CONTEXT_BYTES + NCCL_BYTES if self.cuda else 0

    @property
    def margin_bytes(self) -> int:
        return int(self.memory_bytes * MARGIN)


def peak_flops(device: str, dtype: str) -> float | None:
    """Return a device's peak FLOP/s in bf16, fp16 or fp8; None if unknown.

    device: torch's device name, or a name in the table above. A MIG slice's peak is unknown, because the name does not
    give the slice's share of the GPU's peak.
    """
    half, fp8 = next((peaks for name, peaks in _PEAKS.items() if name in device.lower()), (None, None))
    peak = {"bf16": half, "fp16": half, "fp8": fp8}.get(dtype)
    return None if peak is None or "MIG" in device else peak * 1e12


def hardware(name: str, setting: str = "--gpu") -> Hardware:
    """Return the device `name`: a GPU in the table, or `cpu-GIB` for ranks that share only a CPU.

    Example: "cpu-16" has 16 GiB. Raises UnknownHardware with the known names.
    """
    if name in _GPUS:
        gib, capability = _GPUS[name]
        return Hardware(name, int(gib * GIB), capability)
    if match := re.fullmatch(r"cpu-(\d+)", name):
        return Hardware(name, int(match[1]) * GIB, None)
    raise UnknownHardware(f"{setting} = {name}: known are {', '.join(_GPUS)}, and cpu-GIB, e.g. cpu-16")
