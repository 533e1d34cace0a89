"""Implements `engine.exact` in the trainer: forward passes with rows that do not interact (`common.row_math`).

Gradients belong to the same functions, and come from the operators that all other runs use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dppo_megatron.common.row_math import attention, product

from .attention import PackedAttention


class ExactAttention(PackedAttention):
    """Replaces SDPA, because SDPA's sums over keys depend on the number of queries in the call."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            raise ValueError("engine.exact = true: context parallelism is not supported; set parallel.context to 1")
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        return _Attention.apply(query, key, value, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        first = torch.zeros(len(query), dtype=torch.long)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return attention(query, key, value, first, scale).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=ctx.scale, enable_gqa=True)
        return (*torch.autograd.grad(out, (query, key, value), grad), None)


def multiply_exactly(model: nn.Module) -> None:
    """Make Megatron's linear layers of `model` multiply by `row_math.product` in the forward pass."""
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module._forward_impl = partial(_with_exact_product, module._forward_impl)


def _with_exact_product(forward: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
    """Run a layer's forward pass with the exact product in place of `torch.matmul`.

    Raises RuntimeError unless the layer calls `torch.matmul` exactly once.
    """
    with _Products() as products:
        out = forward(*arguments, **options)
    if products.count != 1:
        raise RuntimeError(
            f"engine.exact = true: a layer called torch.matmul {products.count} times, expected once; install the "
            "pinned Megatron-core"
        )
    return out


class _Products(TorchFunctionMode):
    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.matmul:
            self.count += 1
            return product(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))
