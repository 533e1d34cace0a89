"""Implements RMSNorm and rotary position embedding for the local layer spec, with gradients that need little memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dppo_megatron.common.row_math import rms_norm as normalise
from dppo_megatron.common.row_math import rotated

if TYPE_CHECKING:
    from jaxtyping import Float


class RMSNorm(torch.nn.RMSNorm):
    """Supports sequence parallelism, unlike Megatron's torch norm, by marking the weight for the gradient reduction.

    With `layernorm_zero_centered_gamma` the norm multiplies by 1 + weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by Megatron

    def forward(self, x: Tensor) -> Tensor:
        if self.zero_centered:  # 1 + weight would lose digits in 16 bits
            return rms_norm(x.float(), 1 + self.weight.float(), self.eps).to(x.dtype)
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Float[Tensor, "... d"], weight: Float[Tensor, " d"], eps: float | None) -> Float[Tensor, "... d"]:
    """Return weight x / rms(x) in the dtype of x."""
    if x.is_cuda:  # one fused kernel there, a dozen passes on the CPU
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """Computes y = w x / rms(x) in fp32. With n = x / rms(x): dx = (w g - n mean(w g n)) / rms(x), dw = sum(g n)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, normed, scale = normalise(x, weight, eps)
        ctx.save_for_backward(normed, scale, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        inner = grad.float() * weight
        along = (inner * normed).mean(-1, keepdim=True)
        grad_x = torch.addcmul(inner, normed, along, value=-1).mul_(scale)
        return grad_x.to(grad.dtype), grad_weight, None


def rotate(
    x: Float[Tensor, "T h d"], cos: Float[Tensor, "T 1 r"], sin: Float[Tensor, "T 1 r"]
) -> Float[Tensor, "T h d"]:
    """Rotate the pairs (i, i + r/2) of each head by the row's angles (Hugging Face's weight layout).

    The first r of a head's d dimensions are rotated; the others pass through.
    """
    rotated_dims = cos.shape[-1]
    if rotated_dims == x.shape[-1]:
        return _Rotate.apply(x, cos, sin)
    return torch.cat((_Rotate.apply(x[..., :rotated_dims], cos, sin), x[..., rotated_dims:]), dim=-1)


class _Rotate(torch.autograd.Function):
    """Saves only the tables, because the gradient of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotated(grad, cos, sin, -1), None, None
