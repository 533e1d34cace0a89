"""With batch_invariant a row of the head has the same bits whatever rows stand beside it, at any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dppo_megatron.vocab_parallel import (
    batch_invariant_logits,
    collectives,
    fixed_products,
    linear,
    linear_token_statistics,
    token_statistics,
)

TOKENS, PARTS = 257, ((0, 257), (5, 1), (6, 2), (100, 3), (17, 7), (1, 32), (101, 83))  # start, rows
SMALL = [(64, 300, torch.float32), (64, 300, torch.bfloat16), (48, 2003, torch.float32)]
LARGE = [(64, 50_257, torch.float32), (8, 152_064, torch.bfloat16)]
SIZES = [*SMALL, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE)]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def given(width: int, columns: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(TOKENS, width, generator=generator).to(dtype),
        "weight": torch.randn(columns, width, generator=generator).div(width**0.5).mul(3).to(dtype),
        "target": torch.randint(0, columns, (TOKENS,), generator=generator),
        "topk": torch.randint(0, columns, (TOKENS, 5), generator=generator),
        "gradient": torch.randn(TOKENS, generator=generator),
    }


def rows_of(g: dict[str, torch.Tensor], rows: slice, head: str, **options: Any) -> dict[str, torch.Tensor]:
    """Statistics and hidden gradient of these rows, computed by themselves."""
    hidden = g["hidden"][rows].clone().requires_grad_()
    ids = {"target_ids": g["target"][rows], "topk_ids": g["topk"][rows]}
    if head == "fused":
        found = linear_token_statistics(
            hidden, g["weight"], **ids, entropy="differentiable", batch_invariant=True, **options
        )
    else:
        logits = batch_invariant_logits(hidden, g["weight"])
        found = token_statistics(logits, **ids, entropy="differentiable", inplace=True, **options)
    losses = found.logprob + found.entropy + found.other_logprob + found.topk_logprob.sum(dim=1)
    (losses * g["gradient"][rows]).sum().backward()
    return {
        "logprob": found.logprob.detach(),
        "entropy": found.entropy.detach(),
        "topk": found.topk_logprob.detach(),
        "other": found.other_logprob.detach(),
        "hidden gradient": hidden.grad,
    }


@pytest.mark.parametrize("head", ["fused", "stored"])
@pytest.mark.parametrize(("width", "columns", "dtype"), SIZES)
def test_rows_alone_and_beside_others(head: str, width: int, columns: int, dtype: torch.dtype) -> None:
    g = given(width, columns, dtype)
    torch.set_num_threads(1)
    whole = rows_of(g, slice(0, TOKENS), head)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for start, size in PARTS:
            rows = slice(start, start + size)
            for name, value in rows_of(g, rows, head).items():
                assert torch.equal(whole[name][rows], value), f"{name} of {size} rows on {threads} threads"


FEW = [(8, 37), (8, 3142), (512, 37), (1024, 128)]  # a CPU without a bf16 product takes a second for each


@pytest.mark.parametrize(
    ("width", "columns", "dtype"),
    [(*case, dtype) for dtype in (torch.float32, torch.bfloat16) for case in FEW]
    + [(512, 3142, torch.float32), (1024, 1024, torch.float32)],
)
def test_products_alone(width: int, columns: int, dtype: torch.dtype) -> None:
    """Both ways, at widths that a test of the whole head is too slow for; a last tile nearly empty, and nearly full."""
    g = given(width, columns, dtype)
    back = torch.randn(TOKENS, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    for rows, matrix in ((g["hidden"], g["weight"].t()), (back, g["weight"])):
        torch.set_num_threads(1)
        whole = fixed_products.fixed_mm(rows, matrix)
        torch.testing.assert_close(whole, rows @ matrix)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for start, size in ((0, 257), (1, 1), (3, 129), (2, 255)):
                part = fixed_products.fixed_mm(rows[start : start + size], matrix)
                assert torch.equal(whole[start : start + size], part), f"{size} rows on {threads} threads"


def test_a_product_of_all_rows_at_once_is_not_invariant() -> None:
    """What the fixed tiles are for. Where this fails they may not be needed any more."""
    g = given(64, 300, torch.float32)
    whole = g["hidden"] @ g["weight"].t()
    alone = torch.cat([g["hidden"][i : i + 1] @ g["weight"].t() for i in range(TOKENS)])
    assert not torch.equal(whole, alone)


@pytest.mark.parametrize("options", [{"block_columns": 100}, {"tiles": 4}, {"temperature": 0.7}])
def test_it_is_the_same_function(options: dict[str, Any]) -> None:
    g = given(64, 300, torch.float64)
    results = []
    for invariant in (False, True):
        leaves = [g[name].clone().requires_grad_() for name in ("hidden", "weight")]
        bias = torch.linspace(-1, 1, 300, dtype=torch.float64, requires_grad=True)
        target, topk, mask = g["target"] % 290, g["topk"] % 290, torch.arange(TOKENS) % 3 > 0
        found = linear_token_statistics(
            *leaves, target, topk, 290, **options, bias=bias, loss_mask=mask, batch_invariant=invariant
        )  # fmt: skip
        (found.logprob + found.other_logprob).sum().backward()
        results.append([found.logprob.detach(), found.entropy, *(leaf.grad for leaf in (*leaves, bias))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_stored_logits_have_the_gradients_of_a_linear_layer() -> None:
    g = given(64, 300, torch.float64)
    results = []
    for product in (batch_invariant_logits, torch.nn.functional.linear):
        leaves = [g[name].clone().requires_grad_() for name in ("hidden", "weight")]
        logits = product(*leaves)
        (logits * torch.linspace(0, 1, 300, dtype=torch.float64)).sum().backward()
        results.append([logits.detach(), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_no_rows() -> None:
    logits = batch_invariant_logits(torch.zeros(0, 4), torch.zeros(9, 4))
    assert logits.shape == (0, 9)


def test_without_it_nothing_of_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise AssertionError("ran without batch_invariant")

    monkeypatch.setattr(linear, "fixed_mm", refuse)
    monkeypatch.setattr(collectives, "_ordered_reduce_scatter", refuse)
    g = given(64, 300, torch.float32)
    hidden = g["hidden"].requires_grad_()
    linear_token_statistics(hidden, g["weight"], g["target"]).logprob.sum().backward()
    assert hidden.grad is not None
