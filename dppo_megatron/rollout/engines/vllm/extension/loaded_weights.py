"""Compute fingerprints of the weights that a worker's model loaded, although vLLM changes them after loading.

CPU kernels store a packed copy that cannot be read and drop the weight. GPU kernels may shuffle, pad or quantize the
weight. So each layer's weights are summed twice when vLLM processes the layer: as loaded, and as they remain. A
fingerprint uses the loaded sum only if the remaining weights are still unchanged.

Example, a layer with a kernel that negates its weight W:
    load W = [1, 2]   loaded: sum of [1, 2]   remaining: sum of [-1, -2]
    fingerprint, weight still [-1, -2]: sum of [1, 2], equal to the trainer's
    fingerprint, weight [-7, -8], the kernel's old copy: sum of [-7, -8], which no version has
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from vllm.distributed.parallel_state import get_pp_group, model_parallel_is_initialized

from dppo_megatron.weights.fingerprint import WorkerSums, add_shares, module_shares


class LoadedWeights:
    """Sums the loaded weights of a model. Call `follow` before every update; processing installs new kernels."""

    _instances: ClassVar[WeakKeyDictionary[torch.nn.Module, LoadedWeights]] = WeakKeyDictionary()

    @classmethod
    def for_model(cls, model: torch.nn.Module) -> LoadedWeights:
        """Return the only instance for `model`."""
        return cls._instances.setdefault(model, cls(model))

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._processed: WeakKeyDictionary[torch.nn.Module, tuple[WorkerSums, WorkerSums]] = WeakKeyDictionary()
        self.fingerprint_s = self.pack_s = 0.0  # seconds for layers that were processed since `follow`

    def follow(self) -> None:
        """Sum the weights of each layer before and after vLLM processes them."""
        self.fingerprint_s = self.pack_s = 0.0
        for name, module in self._model.named_modules():
            self._names[module] = name
            method: Any = getattr(module, "quant_method", None)
            process = getattr(method, "process_weights_after_loading", None)
            if process is not None and not isinstance(process, partial):
                method.process_weights_after_loading = partial(self.processed, process=process)

    def processed(self, module: torch.nn.Module, process: Any) -> Any:
        name, began = self._names[module], time.perf_counter()
        loaded = module_shares(name, module, set())
        summed = time.perf_counter()
        result = process(module)
        packed = time.perf_counter()
        self._processed[module] = loaded, module_shares(name, module, set())
        self.pack_s += packed - summed
        self.fingerprint_s += time.perf_counter() - packed + summed - began
        return result

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Count the time inside the context as packing, for layers that vLLM does not process itself."""
        began, counted = time.perf_counter(), self.pack_s + self.fingerprint_s
        yield
        self.pack_s += time.perf_counter() - began - (self.pack_s + self.fingerprint_s - counted)

    def shares(self) -> WorkerSums:
        shares: WorkerSums = {}
        counted_ids: set[int] = set()
        modules = dict(self._model.named_modules())
        heads = {name for name, module in modules.items() if _is(module, "ParallelLMHead")}
        stage = get_pp_group() if model_parallel_is_initialized() else None
        first, last = stage is None or stage.is_first_rank, stage is None or stage.is_last_rank
        for name, module in modules.items():
            embeds = _is(module, "VocabParallelEmbedding")
            now = module_shares(_hf_name(name, embeds=embeds and name not in heads), module, counted_ids)
            loaded, remaining = self._processed.get(module, ({}, {}))
            is_head = last and (name in heads or (not heads and embeds))
            if is_head and hasattr(module, "cpu_linear"):  # the head computes with a copy made in processing
                add_shares(shares, {"lm_head": next(iter(loaded.values()), (0, 0))})
                now = {} if name in heads else now
            elif loaded and now == remaining:
                now = loaded
            if embeds and not (last if name in heads else first):
                # Models create embedding and head on stages that use neither, and a tied embedding on the first and the
                # last stage. Only the last stage's head counts, as lm_head.
                tied = is_head and not hasattr(module, "cpu_linear")
                now = {"lm_head": next(iter(now.values()), (0, 0))} if tied else {}
            add_shares(shares, now)
        return shares


def _hf_name(name: str, *, embeds: bool) -> str:
    """Return a layer's Hugging Face name. vLLM names layers under an adapter and parts of gpt-oss differently."""
    return "embed_tokens" if embeds else re.sub(r"(?<=\d)\.attn$", ".self_attn", name.replace(".base_layer", ""))


def _is(module: torch.nn.Module, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(module).__mro__)
