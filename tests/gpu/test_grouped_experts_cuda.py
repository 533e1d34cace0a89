"""Grouped experts on a GPU against products per expert in float64: torch's kernel with empty and uneven groups."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="no CUDA device of compute capability 9 or 10 on this machine",
)
EXPERTS, INPUTS, ROWS, RANK, SCALING = 5, 256, 96, 12, 2.0


class FakeAdapter(nn.Module):
    """A of two layers and the B of their fused rows, as `hf.lora.Adapter`, on one rank."""

    enabled, scaling = True, SCALING

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.A = nn.Parameter(torch.randn(2 * RANK, INPUTS, generator=generator).to(DEVICE, torch.bfloat16) / 16)
        self.B = nn.Parameter(torch.randn(ROWS, RANK, generator=generator).to(DEVICE, torch.bfloat16) / 4)
        self.owner = torch.eye(2).repeat_interleave(ROWS // 2, 0).to(self.B)

    def forward(self) -> tuple[nn.Parameter, nn.Parameter]:
        return self.A, self.B

    def reducing(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a, b


@pytest.mark.parametrize("counts", [(7, 0, 129, 1, 64), (0, 3, 300, 0, 0)], ids=str)
def test_values_and_gradients_agree_with_float64(counts: tuple[int, ...]) -> None:
    experts = pytest.importorskip("dppo_megatron.train.actor.experts")
    generator = torch.Generator().manual_seed(1)
    layers = []
    for _ in counts:
        weight = nn.Parameter(torch.randn(ROWS, INPUTS, generator=generator).to(DEVICE, torch.bfloat16) / 16, False)
        layers.append(SimpleNamespace(weight=weight, lora=FakeAdapter(generator)))
    local = SimpleNamespace(local_experts=[SimpleNamespace(linear_fc1=layer) for layer in layers])
    projection = experts._Projection(local, "linear_fc1")
    projection.ends = torch.tensor(counts, device=DEVICE).cumsum(0, dtype=torch.int32)
    x, upstream = (torch.randn(sum(counts), n, generator=generator).to(DEVICE, torch.bfloat16) for n in (INPUTS, ROWS))
    leaves = [x.requires_grad_(), *(p for layer in layers for p in layer.lora.parameters())]
    out, _ = projection(x)
    got = [out, *torch.autograd.grad(out, leaves, upstream)]

    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    parts = []
    for rows, layer, a, b in zip(doubles[0].split(counts), layers, doubles[1::2], doubles[2::2], strict=True):
        fused = (layer.lora.owner.double()[:, :, None] * b[:, None, :]).flatten(1)
        parts.append(rows @ layer.weight.double().T + SCALING * (rows @ a.T) @ fused.T)
    exact = torch.cat(parts)
    for value, wanted in zip(got, [exact, *torch.autograd.grad(exact, doubles, upstream.double())], strict=True):
        assert (value - wanted).norm() <= 0.01 * wanted.norm()  # exactly 0 where an expert has no tokens
