"""SwiGLU for the local layer spec, where Megatron's is not fused: its gradient is written into place once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float


def fuse_gates(model: nn.Module) -> None:
    """From now on the dense MLPs of `model` compute SwiGLU by `swiglu`, where Megatron's do it by several operators.

    Not as a class of ours in the layer spec: Megatron gives a group to its own alone.
    """
    for module in model.modules():
        if type(module) is MLP and _is_plain(module.config):
            module.forward = partial(_forward, module)


def _is_plain(config: TransformerConfig) -> bool:
    """Whether Megatron computes SwiGLU without biases and bounds, and by operators one after the other."""
    fused = config.bias_activation_fusion or config.add_bias_linear or config.use_te_activation_func
    bounded = config.activation_func_clamp_value is not None or config.glu_linear_offset
    return not fused and not bounded and config.gated_linear_unit and config.activation_func is F.silu


def _forward(mlp: MLP, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: Any) -> Any:
    if per_token_scale is not None:  # an expert's
        return MLP.forward(mlp, hidden_states, per_token_scale, **options)
    gate_up, _ = mlp.linear_fc1(hidden_states)
    return mlp.linear_fc2(swiglu(gate_up))


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
