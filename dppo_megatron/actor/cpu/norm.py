"""RMSNorm for the local layer spec."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dppo_megatron.common.row_math import rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """Megatron's torch norm refuses sequence parallelism; this one marks its weight for the gradient reduction."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # one fused kernel there, a dozen passes on the CPU
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """y = w x / rms(x) in fp32. With n = x / rms(x): dx = (w g - n mean(w g n)) / rms(x), dw = sum(g n)."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        out, normed, scale = rms_norm(x, weight, eps)
        ctx.save_for_backward(normed, scale, weight)
        return out

    @staticmethod
    def backward(ctx, grad):
        normed, scale, weight = ctx.saved_tensors
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        inner = grad.float() * weight
        along = (inner * normed).mean(-1, keepdim=True)
        grad_x = torch.addcmul(inner, normed, along, value=-1).mul_(scale)
        return grad_x.to(grad.dtype), grad_weight, None
