"""What engines need of the memory of their GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.common.hardware import Hardware
from dppo_megatron.config import Config
from dppo_megatron.hf import HFModelConfig, WeightMap, fp8
from dppo_megatron.hf.safetensors_file import TensorInfo

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
    if not config.engine_devices or not hardware.cuda:
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
