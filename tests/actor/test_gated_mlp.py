"""Our SwiGLU beside the operators it stands for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dppo_megatron.actor.cpu.mlp import swiglu
from tests.actor.scenarios import update


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_are_the_same_bits(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(37, 1, 48, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(37, 1, 24, generator=generator).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    got = swiglu(x)
    assert torch.equal(got, expected)
    assert torch.equal(*(torch.autograd.grad(y, x, upstream)[0] for y in (got, expected)))


def test_dense_layers_have_it_and_layers_of_experts_do_not(one_rank):
    runs = one_rank(update.shared_prefixes)
    assert runs["dense"][0]["fused_gates"] == {"MLP"}
    assert runs["experts"][0]["fused_gates"] <= {"MLP"}
