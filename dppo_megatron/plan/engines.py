"""What engines need of the machines: whole GPUs of one node each, and memory for the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.common.hardware import Hardware
from dppo_megatron.config import Config
from dppo_megatron.hf import HFModelConfig, WeightMap, fp8
from dppo_megatron.hf.safetensors_file import TensorInfo

from .cluster import Cluster

UNUSED = 0.1  # of the memory: what servers leave free by default, CUDA graphs and activations. An assumption.


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one GPU of an engine. `cache`: what weights leave for keys and values, or `engine.kv_cache_bytes`;
    negative when weights do not fit."""

    weights: int
    cache: int
    per_sequence: int  # keys and values of a sequence of `engine.max_model_len`

    @property
    def sequences(self) -> int:
        """As long as they may be, at once; 0 = the engine does not start."""
        return max(0, self.cache // self.per_sequence)


def engine_devices(config: Config) -> int:
    """Devices of the engines that the run starts."""
    return config.started_engines * config.engine.tensor_parallel


def devices_needed(config: Config) -> int:
    """Devices of trainer ranks and engines; colocated engines use the ranks'."""
    serving = engine_devices(config)
    if config.engine.placement == "colocated":
        return max(config.parallel.world_size, serving)
    return config.parallel.world_size + serving


def published_bytes(hf: HFModelConfig, config: Config) -> int:
    """One version of the weights as engines take it."""
    dtype = DTYPES[config.engine.dtype].torch
    tensors = {name: TensorInfo(dtype, shape) for name, shape in WeightMap(hf).hf_tensors().items()}
    if config.engine.quantization != "none":
        tensors = fp8.quantized_info(tensors)
    return sum(info.nbytes for info in tensors.values())


def engine_memory(hf: HFModelConfig, config: Config, hardware: Hardware) -> EngineMemory | None:
    """None where the run starts no engine, and on a CPU, whose memory is not divided."""
    engine = config.engine
    if not engine_devices(config) or not hardware.cuda:
        return None
    weights = -(-published_bytes(hf, config) // engine.tensor_parallel)
    if hf.mla is not None:
        width = hf.mla.kv_lora_rank + hf.mla.qk_rope_head_dim  # on every GPU
    else:
        width = 2 * max(1, hf.num_kv_heads // engine.tensor_parallel) * hf.head_dim
    usable = int(hardware.memory_bytes * (1 - UNUSED)) - hardware.reserved_bytes
    cache = usable - weights
    if engine.kv_cache_bytes is not None:
        cache = min(cache, engine.kv_cache_bytes)
    return EngineMemory(weights, cache, engine.max_model_len * hf.num_layers * width * DTYPES[engine.dtype].bytes)


def placement_problems(config: Config, cluster: Cluster) -> Iterator[str]:
    """Why there are too few devices, or none that an engine could have on one node."""
    engine, serving, needed = config.engine, engine_devices(config), devices_needed(config)
    if serving and engine.tensor_parallel > cluster.gpus_per_node:
        yield (
            f"engine.tensor_parallel = {engine.tensor_parallel}: an engine is on one node, of {cluster.gpus_per_node} "
            "devices here; set it to at most that"
        )
    elif needed > cluster.devices:
        engines = f" and {engine.count} engines of {engine.tensor_parallel}" if serving else ""
        shared = ", which share devices," if serving and engine.placement == "colocated" else ""
        yield (
            f"parallel.world_size = {config.parallel.world_size}: trainer ranks{engines}{shared} need {needed} "
            f"devices, {cluster.nodes} x {cluster.gpus_per_node} are {cluster.devices}; lower one of them or add nodes"
        )
    elif serving and (slots := _slots(config, cluster)) < engine.count:
        yield (
            f"engine.count = {engine.count}: {cluster.nodes} x {cluster.gpus_per_node} devices, with trainer ranks on "
            f"{config.parallel.world_size}, hold {slots} engines of {engine.tensor_parallel} devices of one node each; "
            "lower it or engine.tensor_parallel"
        )


def _slots(config: Config, cluster: Cluster) -> int:
    """Engines that find their devices on one node: beside the ranks, which fill node after node, or under them."""
    per_node = cluster.gpus_per_node
    full, begun = divmod(config.parallel.world_size, per_node)
    if config.engine.placement == "colocated":
        full = begun = 0
    tensor = config.engine.tensor_parallel
    free = cluster.nodes - full - bool(begun)
    return free * (per_node // tensor) + bool(begun) * ((per_node - begun) // tensor)
