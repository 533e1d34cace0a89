"""SwiGLU for the local layer spec, where Megatron's is not fused: its gradient is written into place once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


class GatedMLP(MLP):
    """Megatron's MLP without biases, with SwiGLU and the activation of one operator. The same bits."""

    @staticmethod
    def stands_for(config: TransformerConfig) -> bool:
        """Whether Megatron's own computes this, and by operators one after the other."""
        plain = not (config.bias_activation_fusion or config.add_bias_linear or config.use_te_activation_func)
        bounded = config.activation_func_clamp_value is not None or config.glu_linear_offset
        return plain and not bounded and config.gated_linear_unit and config.activation_func is F.silu

    def forward(self, hidden_states: Tensor, per_token_scale: None = None, **_: Any) -> tuple[Tensor, None]:
        if per_token_scale is not None:
            raise ValueError("per_token_scale: for experts, whose MLP is Megatron's own")
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(gate_up))


def swiglu(gate_up: Float[Tensor, "... 2*F"]) -> Float[Tensor, "... F"]:
    """silu(gate) * up."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        of_gate, of_up = out.chunk(2, dim=-1)
        torch.mul(grad, activated, out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return out
