"""Token statistics on a GPU, both backends, against float64 on the CPU. Not run where there is no CUDA device."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dppo_megatron.vocab_parallel import token_statistics

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

BACKENDS = ["torch"] + (["triton"] if importlib.util.find_spec("triton") else [])
T, V, PADDED, K = 257, 5003, 5120, 20


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_agree_with_float64(backend, dtype):
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(T, PADDED, generator=generator)).to(dtype)
    target = torch.randint(V, (T,), generator=generator)
    topk = logits[:, :V].float().topk(K).indices
    weights = torch.randn(T, K + 2, generator=generator)

    def loss(stats, w):
        return (w[:, 0] * stats.logprob + w[:, 1] * stats.entropy).sum() + (w[:, 2:] * stats.topk_logprob).sum()

    results = []
    for x, options in ((logits.double(), {}), (logits.cuda(), {"backend": backend})):
        x = x.clone().requires_grad_()
        place = x.device
        stats = token_statistics(
            x, target.to(place), topk.to(place), vocab_size=V, entropy="differentiable", inplace=False, **options
        )
        loss(stats, weights.to(place)).backward()
        results.append((stats.logprob.detach().cpu(), stats.entropy.detach().cpu(), x.grad.cpu()))
    for got, expected in zip(results[1][:2], results[0][:2], strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=4e-6)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(results[1][2].double(), results[0][2], rtol=tolerance, atol=tolerance * 1e-1)
    assert not results[1][2][:, V:].any()
