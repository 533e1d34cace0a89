"""What a worker's model holds after an update, as fingerprints of the weights that it was given.

vLLM changes a layer's weights once they are loaded: CPU kernels keep a packed copy that cannot be read and drop the
weight, GPU kernels may shuffle, pad or quantise anew. So each layer is seen twice when it is processed: as loaded, and
as it stays. What stays must still be there when the fingerprint is asked for; then what was loaded stands for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from vllm.distributed.parallel_state import get_pp_group, model_parallel_is_initialized

from dppo_megatron.weights.fingerprint import WorkerSums, add_shares, module_shares


class HeldWeights:
    """Of one model. `follow` it before every update: processing puts new kernels into place."""

    _of_models: ClassVar[WeakKeyDictionary[torch.nn.Module, HeldWeights]] = WeakKeyDictionary()

    @classmethod
    def of(cls, model: torch.nn.Module) -> HeldWeights:
        """The one of `model`, whoever asks."""
        return cls._of_models.setdefault(model, cls(model))

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._processed: WeakKeyDictionary[torch.nn.Module, tuple[WorkerSums, WorkerSums]] = WeakKeyDictionary()
        self.fingerprint_s = self.pack_s = 0.0  # of the layers that were processed since `follow`

    def follow(self) -> None:
        self.fingerprint_s = self.pack_s = 0.0
        for name, module in self._model.named_modules():
            self._names[module] = name
            method = getattr(module, "quant_method", None)
            process = getattr(method, "process_weights_after_loading", None)
            if process is not None and not isinstance(process, _Following):
                method.process_weights_after_loading = _Following(self, process)

    def processed(self, module: torch.nn.Module, process: Any) -> Any:
        name, began = self._names[module], time.perf_counter()
        loaded = module_shares(name, module, set())
        told = time.perf_counter()
        result = process(module)
        packed = time.perf_counter()
        self._processed[module] = loaded, module_shares(name, module, set())
        self.pack_s += packed - told
        self.fingerprint_s += time.perf_counter() - packed + told - began
        return result

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Counts what is done inside, for other layers than those that vLLM processes."""
        began, counted = time.perf_counter(), self.pack_s + self.fingerprint_s
        yield
        self.pack_s += time.perf_counter() - began - (self.pack_s + self.fingerprint_s - counted)

    def shares(self) -> WorkerSums:
        shares: WorkerSums = {}
        seen: set[int] = set()
        modules = dict(self._model.named_modules())
        heads = {name for name, module in modules.items() if _is(module, "ParallelLMHead")}
        stage = get_pp_group() if model_parallel_is_initialized() else None
        first, last = stage is None or stage.is_first_rank, stage is None or stage.is_last_rank
        for name, module in modules.items():
            now = module_shares(name.replace(".base_layer", ""), module, seen)  # beside an adapter
            loaded, kept = self._processed.get(module, ({}, {}))
            embeds = _is(module, "VocabParallelEmbedding")
            is_head = last and (name in heads or (not heads and embeds))
            if is_head and hasattr(module, "cpu_linear"):  # it computes with a copy of what it was processed with
                add_shares(shares, {"lm_head": next(iter(loaded.values()), (0, 0))})
                now = {} if name in heads else now
            elif loaded and now == kept:
                now = loaded
            if embeds and not (last if name in heads else first):
                # Models make embedding and head on stages that need neither, and one that is tied to the other on both
                # ends. The head of the last stage counts as such, the others not.
                tied = is_head and not hasattr(module, "cpu_linear")
                now = {"lm_head": next(iter(now.values()), (0, 0))} if tied else {}
            add_shares(shares, now)
        return shares


class _Following:
    """`process_weights_after_loading` of one layer's method."""

    def __init__(self, held: HeldWeights, process: Any):
        self._held, self._process = held, process

    def __call__(self, layer: torch.nn.Module) -> Any:
        return self._held.processed(layer, self._process)


def _is(module: torch.nn.Module, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(module).__mro__)
