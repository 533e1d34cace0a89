"""Estimates how much GPU memory engines need."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.common.hardware import Hardware
from dppo_megatron.config import Config
from dppo_megatron.hf import HFModelConfig, WeightMap, fp8
from dppo_megatron.hf.peft import adapter_shapes
from dppo_megatron.hf.safetensors_file import TensorInfo
from dppo_megatron.rollout.engines.kinds import kind_of
from dppo_megatron.weights.broadcast_plan import BUCKET_BYTES, expert_layer

FP32 = 4
UNUSED = 0.1  # assumed memory share that servers leave free for CUDA graphs and activations


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Counts bytes on an engine GPU, in the stage that serves the fewest sequences.

    `cache` is the memory left for keys and values after loading the weights, at most `engine.kv_cache_bytes`. It is
    negative if the weights do not fit.
    """

    weights: int
    cache: int
    per_sequence: int  # keys and values of `engine.max_model_len` tokens, delta net states
    update: int  # needed in addition to weights and cache while an update loads, see `update_bytes`
    room: int  # available to an update: memory without weights, cache and libraries

    @property
    def sequences(self) -> int:
        """Return how many sequences of maximal length fit at once. With 0 the engine does not start."""
        return max(0, self.cache // self.per_sequence)

    @property
    def updates(self) -> bool:
        """Return whether an update fits in addition to weights and cache."""
        return self.update <= self.room


def published_bytes(hf: HFModelConfig, config: Config) -> int:
    """Return how many bytes a published weight version has, in the form that engines load."""
    if config.weight_sync.lora == "adapter":
        shapes = adapter_shapes(hf, config.model.lora).values()
        return DTYPES[config.engine.dtype].bytes * sum(map(math.prod, shapes))
    return sum(info.nbytes for info in _published(hf, config).values())


_LAYER = re.compile(r"\blayers\.(\d+)\.")
# Every GPU in a stage stores these tensors whole: norms, routers, and the projections into the latent space.
_REPLICATED = re.compile(r"norm\.weight$|norm\.bias$|\.gate\.|\.(q_a_proj|kv_a_proj_with_mqa)\.")


def _stage_bytes(hf: HFModelConfig, config: Config) -> list[int]:
    """Return the weight bytes on a GPU of each stage."""
    counts = kind_of(config).stage_layers(hf.num_layers, config.engine.pipeline_parallel)
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    sums = [0] * len(counts)
    for name, info in _published(hf, config).items():
        layer, first = _LAYER.search(name), "embed_tokens" in name
        stage = stage_of[int(layer[1])] if layer else 0 if first else len(counts) - 1
        sums[stage] += info.nbytes if _REPLICATED.search(name) else -(-info.nbytes // config.engine.tensor_parallel)
    return sums


def _published(hf: HFModelConfig, config: Config) -> dict[str, TensorInfo]:
    dtype = DTYPES[config.engine.dtype].torch
    tensors = {name: TensorInfo(dtype, shape) for name, shape in WeightMap(hf).hf_tensors().items()}
    return fp8.quantized_info(tensors) if config.engine.serves_fp8 else tensors


# vLLM and SGLang load each of these weight groups as one module.
_FUSED = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
    (re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\."), ".qkv_a_proj."),
)


def _module(name: str) -> str:
    """Return the engine module that loads the tensor. All experts in a layer belong to one module."""
    if (layer := expert_layer(name)) >= 0:
        return f"experts of layer {layer}"
    for pattern, fused in _FUSED:
        name = pattern.sub(fused, name)
    return name.rpartition(".")[0]


def update_bytes(hf: HFModelConfig, config: Config) -> int:
    """Return the peak bytes that loading new weights needs on a GPU, in addition to weights and cache."""
    sizes: Counter[str] = Counter()
    largest = 0
    for name, info in _published(hf, config).items():
        sizes[_module(name)] += info.nbytes
        largest = max(largest, info.nbytes)
    broadcast = config.weight_sync.transport == "broadcast"
    bucket = max(config.weight_sync.bucket_bytes or BUCKET_BYTES["nccl"], largest) if broadcast else 0
    return kind_of(config).update_bytes(max(sizes.values()), bucket, config)


def engine_memory(hf: HFModelConfig, config: Config, hardware: Hardware) -> EngineMemory | None:
    """Return an engine's memory. None if the run starts no engine, and on a CPU, where processes share memory."""
    engine = config.engine
    if not config.engine_devices or not hardware.cuda:
        return None
    if hf.mla is not None:
        width = hf.mla.kv_lora_rank + hf.mla.qk_rope_head_dim  # every GPU has the whole latent space
    else:
        width = 2 * max(1, hf.num_kv_heads // engine.tensor_parallel) * hf.head_dim
    usable = int(hardware.memory_bytes * (1 - UNUSED)) - hardware.reserved_bytes
    update, stages = update_bytes(hf, config), []
    layers = kind_of(config).stage_layers(hf.num_layers, engine.pipeline_parallel)
    for weights, count in zip(_stage_bytes(hf, config), layers, strict=True):
        cache = usable - weights
        if engine.kv_cache_bytes is not None:
            cache = min(cache, engine.kv_cache_bytes)
        attending = -(-count * len(hf.attention_layers) // hf.num_layers)
        per_sequence = engine.max_model_len * attending * width * DTYPES[engine.dtype].bytes
        if hf.delta_net is not None:  # a state in fp32 for each value head
            state = FP32 * hf.delta_net.num_value_heads * hf.delta_net.key_head_dim * hf.delta_net.value_head_dim
            per_sequence += (count - attending) * state // engine.tensor_parallel
        room = hardware.memory_bytes - hardware.reserved_bytes - weights - max(0, cache)
        stages.append(EngineMemory(weights, cache, per_sequence, update, room))
    return min(stages, key=lambda stage: stage.cache / stage.per_sequence)
