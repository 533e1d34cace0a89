"""The gated delta rule of packed sequences is the recurrence of each sequence by itself, with its gradients."""

import pytest
import torch
from torch import Tensor

from dppo_megatron.train.actor.batch.chunks import plan_chunks
from dppo_megatron.train.actor.local.delta_rule import causal_convolution, gated_delta_rule

BOUNDS = torch.tensor([0, 70, 73, 203, 204])


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    rows = int(BOUNDS[-1])
    q, k = (torch.randn(rows, 2, 8, generator=generator) for _ in range(2))
    v = torch.randn(rows, 4, 12, generator=generator)
    decay, beta = (torch.rand(rows, 4, generator=generator) for _ in range(2))
    return tuple(x.requires_grad_() for x in (q, k, v, -2 * decay, beta))


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One row after the other, in fp64."""
    q, k, v, a, b = (x.double() for x in (query, key, value, decay, beta))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = q.repeat_interleave(2, dim=1) / q.shape[-1] ** 0.5, k.repeat_interleave(2, dim=1)
    out = []
    for start, end in zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True):
        state = q.new_zeros(4, 8, 12)
        for t in range(start, end):
            state = state * a[t].exp()[:, None, None]
            read = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], (v[t] - read) * b[t][:, None])
            out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out)


@pytest.mark.parametrize("chunk", [16, 64])
def test_it_is_the_recurrence(chunk):
    given = inputs()
    weight = torch.randn(len(given[0]), 4, 12, generator=torch.Generator().manual_seed(1))
    expected = recurrence(*given)
    found = gated_delta_rule(*given, plan_chunks(BOUNDS, chunk))
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=2e-6)
    gradients = torch.autograd.grad((found * weight).sum(), given)
    of_recurrence = torch.autograd.grad((expected * weight).sum(), given)
    for got, wanted in zip(gradients, of_recurrence, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_the_convolution_stops_at_the_start_of_a_sequence():
    x = torch.randn(int(BOUNDS[-1]), 6, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(6, 1, 4, generator=torch.Generator().manual_seed(1))
    found = causal_convolution(x, weight, plan_chunks(BOUNDS).columns)
    for start, end in zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True):
        padded = torch.nn.functional.pad(x[start:end].T[None], (3, 0))
        alone = torch.nn.functional.conv1d(padded, weight, groups=6)[0].T
        torch.testing.assert_close(found[start:end], alone, rtol=1e-5, atol=1e-6)


def test_the_example_of_a_plan():
    plan = plan_chunks(torch.tensor([0, 3, 9]), 4)
    assert plan.steps == (2, 1)
    assert plan.rows.tolist() == [3, 4, 5, 6, 0, 1, 2, 9, 7, 8, 9, 9]
    assert plan.places.tolist() == [4, 5, 6, 0, 1, 2, 3, 8, 9]
    assert plan.columns[:, 0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
