"""The machines a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass

from dppo_megatron.common.hardware import Hardware

from .memory import Memory


@dataclass(frozen=True, slots=True)
class Cluster:
    """What there is to run on."""

    nodes: int
    gpus_per_node: int
    hardware: Hardware

    @property
    def devices(self) -> int:
        return self.nodes * self.gpus_per_node

    def need(self, memory: Memory) -> int:
        """Bytes of a device that `memory` needs, with what libraries take and the margin."""
        return memory.tensors + self.hardware.reserved_bytes + self.hardware.margin_bytes

    def fits(self, memory: Memory) -> bool:
        return self.need(memory) <= self.hardware.memory_bytes
