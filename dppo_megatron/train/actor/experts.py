"""Computes local experts with frozen weights by grouped products, each a call of `torch.nn.functional.grouped_mm`.

Megatron's SequentialMLP computes one expert after the other. Here each projection is a single grouped product for all
experts, and the adapters are two more. The frozen weights of a projection share a tensor [experts, outputs, inputs].
The `weight` of each expert is a view of that tensor, so load, export, offload and merge work as without grouping. A and
B are stacked in each forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from dppo_megatron.config.schema import Config
from dppo_megatron.hf.lora import spread
from dppo_megatron.hf.megatron_model import ADAPTER

from .lora import ParallelAdapter
from .precision import this_gpu

_ALIGNMENT = 16  # every row must be a multiple of this many bytes
_PROJECTIONS = ("linear_fc1", "linear_fc2")


def group_experts(chunks: Sequence[nn.Module], config: Config) -> None:
    """Make the frozen local experts of `chunks` compute grouped products, unless `why_sequential` gives a reason.

    Call it before the chunks are wrapped, because each weight moves into the projection's tensor. Runs no collectives.
    """
    if why_sequential(chunks, config):
        return
    for experts in _experts(chunks):
        grouped_mlp = copy(experts.local_experts[0])  # Megatron's activation and settings
        grouped_mlp._modules = dict(grouped_mlp._modules) | {name: _Projection(experts, name) for name in _PROJECTIONS}
        experts.forward = partial(_forward, experts, grouped_mlp)
    torch.cuda.empty_cache()  # the freed blocks are too small for later allocations


def why_sequential(chunks: Sequence[nn.Module], config: Config) -> str | None:
    """Return the reason why local experts are computed one after the other; None if they are grouped."""
    gpu = this_gpu()
    if config.engine.exact:
        return "engine.exact computes each row as the engine does"
    if gpu and (config.model.dtype != "bf16" or gpu[0] not in (9, 10)):
        # Otherwise grouped_mm also loops over the experts, and the host waits for their counts.
        return "torch's kernel for grouped products needs bf16 and compute capability 9 or 10"
    if any(experts.config.add_bias_linear for experts in _experts(chunks)):
        return "their layers have biases"
    for layers in ([getattr(e, name) for e in x.local_experts] for x in _experts(chunks) for name in _PROJECTIONS):
        if any(size * layers[0].weight.element_size() % _ALIGNMENT for size in layers[0].weight.shape):
            return f"a row or a column of their weights is no multiple of {_ALIGNMENT} bytes"
        adapters = [getattr(layer, ADAPTER, None) for layer in layers]
        if len({a and (a.A.shape, a.B.shape, a.owner is None) for a in adapters}) > 1:
            return "model.lora.targets names layers of some experts only"
    return None


def describe_experts(chunks: Sequence[nn.Module], config: Config) -> list[str]:
    """Return a log line on how this rank computes several local experts in a LoRA run; [] for other runs."""
    if not config.model.lora.r or next(_experts(chunks), None) is None:
        return []
    reason = why_sequential(chunks, config)
    return [f"experts: one after the other, because {reason}" if reason else "experts: grouped matrix products"]


def _experts(chunks: Sequence[nn.Module]) -> Iterator[SequentialMLP]:
    return (m for c in chunks for m in c.modules() if isinstance(m, SequentialMLP) and len(m.local_experts) > 1)


def _forward(experts: SequentialMLP, grouped_mlp: MLP, x: Tensor, counts: Tensor, probs: Tensor) -> tuple[Tensor, None]:
    """Replace SequentialMLP.forward: x [tokens, hidden] and probs [tokens], sorted by expert, and counts [experts]."""
    if not len(x):  # the kernel rejects empty operands
        return SequentialMLP.forward(experts, x, counts, probs)
    if x.is_cuda and not counts.is_cuda:
        counts = counts.pin_memory().to(x.device, non_blocking=True)
    grouped_mlp.linear_fc1.ends = grouped_mlp.linear_fc2.ends = counts.cumsum(0, dtype=torch.int32)
    return MLP.forward(grouped_mlp, x, probs)


class _Projection(nn.Module):
    """Computes a linear layer for all `experts`, and is called like a single expert's layer.

    The model itself keeps a layer for each expert.
    """

    ends: Tensor  # [experts] int32: number of rows up to the end of each expert; `_forward` sets it

    def __init__(self, experts: SequentialMLP, name: str):
        super().__init__()
        layers = [getattr(expert, name) for expert in experts.local_experts]
        self.weights: tuple[nn.Parameter, ...] = tuple(layer.weight for layer in layers)
        self.adapters: tuple[ParallelAdapter, ...] = tuple(getattr(x, ADAPTER) for x in layers if hasattr(x, ADAPTER))
        shared_tensor(self.weights)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        product = partial(F.grouped_mm, offs=self.ends)
        out = product(x, shared_tensor(self.weights).mT)
        if not self.adapters or not (first := self.adapters[0]).enabled:
            return out, None
        # Call the adapters, because a hook in each module waits for the gathered parameters.
        a, b = map(torch.stack, zip(*(adapter() for adapter in self.adapters), strict=True))
        if owners := [adapter.owner for adapter in self.adapters if adapter.owner is not None]:  # all or none
            b = spread(b, torch.stack(owners))
        a, b = first.reducing(a, b)
        missing = -a.shape[1] % (_ALIGNMENT // 2)  # aligns values of 16 bits and more
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
        return out + product(product(x, a.mT) * first.scaling, b.mT), None


def shared_tensor(weights: Sequence[nn.Parameter]) -> Tensor:
    """Return the memory of `weights` as a single tensor [experts, outputs, inputs]; move the weights if necessary."""
    first, size = weights[0].data, weights[0].nbytes
    places = [weight.data_ptr() - first.data_ptr() for weight in weights]
    if first.untyped_storage().nbytes() != len(weights) * size or places != list(range(0, len(weights) * size, size)):
        for weight, part in zip(weights, torch.stack([w.data for w in weights]), strict=True):
            weight.data = part
        first = weights[0].data
    return first.as_strided((len(weights), *first.shape), (first.numel(), *first.stride()))
