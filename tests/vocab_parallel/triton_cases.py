"""Tests of the Triton backend. test_triton_backend.py runs this file in a process with TRITON_INTERPRET=1.

The interpreter shows numerics only. It truncates fp32 to bf16 where the hardware rounds, hence a wider floor.
"""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from dppo_megatron.vocab_parallel import linear_token_statistics, token_statistics, triton_backend
from tests.objectives import centred
from tests.support import statistics_reference
from tests.support.ranks import Ranks
from tests.support.shards import shard_case
from tests.support.statistics_reference import Case, assert_close_to_reference, cases, make_inputs, reference

BASE = Case(seed=5, tokens=9, columns=(75,), vocab=70, topk=5)


@pytest.fixture(autouse=True, params=[4096, 16], ids=["one_tile", "tiles"])
def _tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "TILE", request.param)
    for dtype in ("bf16", "fp16"):
        monkeypatch.setitem(statistics_reference.HALF_ULP, dtype, 2.0 ** {"bf16": -7, "fp16": -10}[dtype])


def check(case: Case, **options: Any) -> None:
    result = shard_case(case, 0, backend="triton", count=False, **options)
    assert_close_to_reference(case, reference(case, make_inputs(case)), result["values"], result["gradient"])


def test_random_cases() -> None:
    @given(case=cases())
    @settings(max_examples=25, deadline=None, derandomize=True)
    def run(case: Case) -> None:
        check(case)

    run()


PEAKED = {"temperature": "tensor", "peaked": True, "entropy": "metric"}


@pytest.mark.parametrize("changes", [{}, {"kept": True}, PEAKED])
def test_case(changes: dict[str, Any]) -> None:
    check(replace(BASE, **changes))


@pytest.mark.parametrize("head", ["logits", "fused"])
def test_a_row_has_the_same_bits_in_every_batch(head: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, columns, vocab = 9, 75, 70
    logits, hidden = torch.randn(tokens, columns, generator=generator) * 3, torch.randn(tokens, 8, generator=generator)
    weight = torch.randn(columns, 8, generator=generator)
    ids = torch.randint(0, vocab, (tokens, 3), generator=generator)

    def of(rows: slice) -> list[torch.Tensor]:
        leaf = (hidden if head == "fused" else logits)[rows].clone().requires_grad_()
        common = (ids[rows, 0], ids[rows], vocab)
        if head == "fused":
            options = {"block_columns": 30, "batch_invariant": True, "backend": "triton"}
            found = linear_token_statistics(leaf, weight, *common, entropy="differentiable", **options)
        else:
            found = token_statistics(leaf, *common, entropy="differentiable", backend="triton")
        (found.logprob + found.entropy + found.other_logprob).sum().backward()
        return [found.logprob.detach(), found.entropy.detach(), found.topk_logprob.detach(), leaf.grad]

    whole = of(slice(0, tokens))
    for rows in (slice(5, 6), slice(6, 8)):
        for one, other in zip(whole, of(rows), strict=True):
            assert torch.equal(one[rows], other), rows


def test_sums_do_not_depend_on_how_many_rows_there_are() -> None:
    if triton_backend.TILE > 75:
        pytest.skip("a row is one tile")
    logits = torch.randn(300, 75, generator=torch.Generator().manual_seed(0)) * 3
    ids, sums = torch.zeros(300, 1, dtype=torch.int64), torch.empty(2, 300, 4)
    triton_backend.forward(logits, ids, 0, 1.0, sums[0], entropy=True, restore=False, large=False)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 12)):
        triton_backend.forward(logits[rows], ids[rows], 0, 1.0, sums[1, rows], entropy=True, restore=False, large=False)
    assert torch.equal(sums[0, :12], sums[1, :12])


def test_tiles_of_the_vocabulary() -> None:
    check(replace(BASE, columns=(76,)), tiles=4)


def test_agrees_with_torch() -> None:
    results = [shard_case(BASE, 0, backend=backend, count=False) for backend in ("torch", "triton")]
    for name, value in results[0]["values"].items():
        assert torch.allclose(value, results[1]["values"][name], atol=1e-6), name
    assert torch.allclose(results[0]["gradient"], results[1]["gradient"], atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("entropy", ["none", "differentiable"])
@pytest.mark.parametrize("column", [0, 4, 60])
def test_nonfinite_rows(bad: float, entropy: str, column: int) -> None:
    logits = torch.randn(4, 70)
    logits[2, column] = bad
    logits.requires_grad_()
    ids = torch.zeros(4, dtype=torch.int64)
    stats = token_statistics(logits, ids, ids.view(4, 1) + 4, entropy=entropy, backend="triton")
    stats.logprob.sum().backward()
    assert stats.nonfinite_rows() == [2]
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[2] == 0).all()


def test_minus_infinity_is_probability_zero() -> None:
    logits = torch.randn(3, 70)
    logits[:, 30:50] = float("-inf")
    logits.requires_grad_()
    stats = token_statistics(logits, torch.tensor([0, 1, 2]), entropy="differentiable", backend="triton")
    (stats.logprob + stats.entropy).sum().backward()
    assert not stats.nonfinite.any()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[:, 30:50] == 0).all()


def test_linear() -> None:
    torch.manual_seed(0)
    gradients = []
    for backend in ("torch", "triton"):
        hidden = torch.ones(5, 4).cumsum(0).mul(0.1).requires_grad_()
        weight = torch.linspace(-1, 1, 160).view(40, 4).requires_grad_()
        stats = linear_token_statistics(
            hidden, weight, torch.arange(5), torch.arange(10).view(5, 2), 38, backend=backend, block_columns=7
        )
        (stats.logprob + stats.other_logprob).sum().backward()
        gradients.append(torch.cat((hidden.grad, weight.grad)))
    assert torch.allclose(*gradients, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True], ids=["stored", "fused"])
def test_score_centering(fused: bool) -> None:
    g = centred.given(6)
    for kind in ("tis", "dppo"):
        expected = centred.dense_gradient(g, kind)
        if fused:
            expected = expected @ g.weight[: centred.VOCAB]
        actual, _ = centred.gradient_through_kernels(g, kind, torch.float32, fused=fused, backend="triton")
        actual = actual if fused else actual[:, : centred.VOCAB]
        assert (actual.double() - expected).abs().max() <= 1e-6 * expected.abs().max().clamp(min=1), kind


def test_every_launch_is_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device. tests/gpu runs it with another one."""
    guarded = []

    def device_of(tensor: torch.Tensor) -> contextlib.nullcontext:
        guarded.append(tensor)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    logits = torch.randn(3, 70, requires_grad=True)
    stats = token_statistics(logits, torch.arange(3), backend="triton")
    assert len(guarded) == 2  # sums, merge
    stats.logprob.sum().backward()
    assert len(guarded) == 4  # coefficients, gradient


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_ranks(ranks: Ranks, dtype: str) -> None:
    if ranks.size != 2:
        pytest.skip("two ranks are enough for the kernels")
    for vocab in (3, 37, 40):  # 3: a shard that is all padding
        case = Case(seed=1, tokens=5, columns=(20, 20), vocab=vocab, topk=5, dtype=dtype)
        results = ranks.run(shard_case, case=case, backend="triton")
        gradient = torch.cat([result["gradient"] for result in results], dim=1)
        assert_close_to_reference(case, reference(case, make_inputs(case)), results[1]["values"], gradient)
        assert all(sum(result["forward"].values()) == 1 and not result["backward"] for result in results)
