"""Token statistics on a GPU, both backends, against float64 on the CPU. Not run where there is no CUDA device."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from dppo_megatron.vocab_parallel import linear_token_statistics, token_statistics
from tests.support.ranks import TORCH, Ranks
from tests.support.shards import shard_case
from tests.support.statistics_reference import Case, assert_close_to_reference, make_inputs, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

DEVICES = torch.cuda.device_count()
TWO_DEVICES = pytest.mark.skipif(DEVICES < 2, reason=f"needs two CUDA devices, this machine has {DEVICES}")
BACKENDS = ["torch"] + (["triton"] if importlib.util.find_spec("triton") else [])
BASE = Case(seed=1, tokens=257, columns=(5120,), vocab=5003, topk=20)
SLACK = 5.0  # a GPU's exp and log, and its order of sums


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("topk", [None, 20, 64])  # 64 and the target: more than the fused merge takes
@pytest.mark.parametrize("temperature", ["one", "tensor"])
def test_values_and_gradients_agree_with_float64(backend: str, dtype: str, topk: int | None, temperature: str) -> None:
    case = replace(BASE, dtype=dtype, topk=topk, temperature=temperature)
    found = shard_case(case, 0, backend, count=False, device="cuda")
    assert not found["nonfinite"].any()
    assert_close_to_reference(case, reference(case, make_inputs(case)), found["values"], found["gradient"], SLACK)


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": (128,), "vocab": 3},  # nearly all padding
        {"columns": (50304,), "vocab": 50257, "tokens": 5},  # few rows, of many tiles
        {"columns": (75,), "vocab": 70, "layout": "transposed"},
        {"columns": (75,), "vocab": 70, "layout": "sliced", "peaked": True},
        {"tokens": 1},
    ],
)
def test_shapes(backend: str, changes: dict) -> None:
    case = replace(BASE, dtype="bf16", **changes)
    found = shard_case(case, 0, backend, count=False, device="cuda")
    assert_close_to_reference(case, reference(case, make_inputs(case)), found["values"], found["gradient"], SLACK)


def test_more_logits_than_32_bits_count(backend: str) -> None:
    """4.5 GB of them. Compared on the rows around element 2^31 and at both ends."""
    tokens, columns, vocab = 17000, 1 << 17, (1 << 17) - 100
    free = torch.cuda.mem_get_info()[0]
    if free < 16 << 30:
        pytest.skip(f"needs 16 GiB of free GPU memory, there are {free / 2**30:.0f}")
    rows = torch.tensor([0, 1, 16383, 16384, 16385, tokens - 1])
    generator = torch.Generator("cuda").manual_seed(1)
    logits = torch.empty(tokens, columns, dtype=torch.bfloat16, device="cuda").normal_(std=3, generator=generator)
    topk = torch.randint(0, vocab, (tokens, 20), device="cuda", generator=generator)
    exact = logits[rows.cuda()].double().cpu().requires_grad_()

    def run(x: torch.Tensor, ids: torch.Tensor, **options: object) -> list[torch.Tensor]:
        stats = token_statistics(x, ids[:, 3], ids, vocab, entropy="differentiable", **options)
        values = [stats.logprob, stats.entropy, stats.other_logprob]
        (sum(value.sum() for value in values) + stats.topk_logprob.sum()).backward()
        return [value.detach().cpu() for value in [*values, stats.topk_logprob]]

    wanted = run(exact, topk[rows.cuda()].cpu())
    found = run(logits.requires_grad_(), topk, backend=backend, inplace=True)
    for value, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(value[rows].double(), expected, rtol=2e-6, atol=1e-5)
    gradient = logits.grad[rows.cuda()].double().cpu()
    assert not gradient[:, vocab:].any()
    torch.testing.assert_close(gradient, exact.grad, rtol=2**-7, atol=1e-5 * float(exact.grad.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_hidden_states(backend: str, dtype: torch.dtype) -> None:
    """Blocks of columns, an odd vocabulary, part of the tokens, temperatures of their own."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(33, 64, generator=generator).to(dtype)
    weight = torch.randn(BASE.columns[0], 64, generator=generator).div(8).to(dtype)
    ids = torch.randint(0, BASE.vocab, (33, 20), generator=generator)
    temperature = torch.rand(33, generator=generator) + 0.5
    mask = torch.rand(33, generator=generator) > 0.3

    def run(device: str, dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
        h, w = (x.to(device, dtype).requires_grad_() for x in (hidden, weight))
        stats = linear_token_statistics(
            h, w, ids[:, 3].to(device), ids.to(device), BASE.vocab, temperature.to(device),
            entropy="differentiable", backend=backend, loss_mask=mask.to(device),
        )  # fmt: skip
        values = [stats.logprob, stats.entropy, stats.other_logprob, stats.topk_logprob]
        sum(value.sum() for value in values).backward()
        return [x.detach().double().cpu() for x in (*values, h.grad, w.grad)]

    # A stored head's logits have the dtype of the weight, too.
    value, gradient = (1e-5, 2e-5) if dtype == torch.float32 else (0.1, 3e-2)
    wanted, found = run("cpu", torch.float64, "torch"), run("cuda", dtype, backend)
    for got, expected in zip(found[:4], wanted[:4], strict=True):
        torch.testing.assert_close(got, expected, rtol=value, atol=value)
    for got, expected in zip(found[4:], wanted[4:], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=gradient * float(expected.abs().max()))


@TWO_DEVICES
def test_tensors_need_not_be_on_the_current_device(backend: str) -> None:
    with torch.cuda.device(0):
        found = shard_case(BASE, 0, backend, count=False, device="cuda:1")
    assert_close_to_reference(BASE, reference(BASE, make_inputs(BASE)), found["values"], found["gradient"], SLACK)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, "nccl", TORCH) as started:
        yield started


@TWO_DEVICES
@pytest.mark.parametrize("vocab", [5003, 2000])  # 2000: the second shard is all padding
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_ranks_over_nccl(ranks: Ranks, backend: str, dtype: str, vocab: int) -> None:
    case = replace(BASE, columns=(2560, 2560), vocab=vocab, dtype=dtype, temperature="tensor")
    results = ranks.run(shard_case, case=case, backend=backend, count=False, device="cuda")
    gradient = torch.cat([result["gradient"] for result in results], dim=1)
    assert_close_to_reference(case, reference(case, make_inputs(case)), results[0]["values"], gradient, SLACK)
    for name, value in results[0]["values"].items():
        assert torch.equal(value, results[1]["values"][name]), name
