"""A row's statistics and gradient have the same bits in every batch, with any number of threads."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dppo_megatron import vocab_parallel

TOKENS, PARTS = 257, ((0, 257), (5, 1), (6, 2), (100, 3), (17, 7), (1, 32), (101, 83))  # start, rows
HEADS = ("logits", "stored", "fused")
SMALL = [
    *((head, 64, 300, dtype) for head in HEADS for dtype in (torch.float32, torch.bfloat16)),
    *((head, 48, 2003, torch.float32) for head in HEADS),
    ("logits", 64, 5000, torch.bfloat16),
]
LARGE = [(head, *size) for head in HEADS for size in ((64, 50_257, torch.float32), (8, 152_064, torch.bfloat16))]
COMPILER = shutil.which("g++") or shutil.which("clang++")


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


def rows_of(g: dict[str, torch.Tensor], rows: slice, head: str, entropy: str) -> dict[str, torch.Tensor]:
    """Statistics and input gradient of these rows, computed without the others. `head` logits: the input is logits."""
    leaf = (g["logits"] if head == "logits" else g["hidden"])[rows].clone().requires_grad_()
    common = {"target_ids": g["target"][rows], "topk_ids": g["topk"][rows], "temperature": 0.7, "entropy": entropy}
    if head == "fused":
        found = vocab_parallel.linear_token_statistics(leaf, g["weight"], **common, batch_invariant=True)
    else:
        logits = leaf if head == "logits" else vocab_parallel.batch_invariant_logits(leaf, g["weight"])
        found = vocab_parallel.token_statistics(logits, **common, inplace=None if head == "logits" else True)
    losses = found.logprob + found.other_logprob + found.topk_logprob.sum(dim=1)
    losses = losses + found.entropy if entropy == "differentiable" else losses
    (losses * g["gradient"][rows]).sum().backward()
    names = ("logprob", "entropy", "topk_logprob", "other_logprob")
    return {name: getattr(found, name).detach() for name in names} | {"gradient": leaf.grad}


@pytest.mark.parametrize("entropy", ["metric", "differentiable"])
@pytest.mark.parametrize(
    ("head", "width", "columns", "dtype"),
    [*SMALL, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE if COMPILER or case[0] != "logits")],
)
def test_a_row_has_the_same_bits_in_every_batch(
    head: str, width: int, columns: int, dtype: torch.dtype, entropy: str
) -> None:
    if entropy == "metric" and (head != "logits" or dtype == torch.bfloat16):
        pytest.skip("the kernels without its gradient are tested on fp32 logits")
    g = given(width, columns, dtype)
    g["logits"] = g["hidden"] @ g["weight"].t()
    torch.set_num_threads(1)
    whole = rows_of(g, slice(0, TOKENS), head, entropy)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for start, size in PARTS:
            rows = slice(start, start + size)
            for name, value in rows_of(g, rows, head, entropy).items():
                assert torch.equal(whole[name][rows], value), f"{name} of {size} rows on {threads} threads"


@pytest.mark.parametrize("blocks", [2, 5, 16])
def test_blocks_are_joined_in_order(blocks: int) -> None:
    sums = torch.rand(blocks, 4096, 3, generator=torch.Generator().manual_seed(0))
    whole = vocab_parallel.merge.join_sums(sums, 0.7)
    for size in (1, 2, 3, 7, 32):
        assert torch.equal(whole[:size], vocab_parallel.merge.join_sums(sums[:, :size], 0.7))


@pytest.mark.parametrize("options", [{"block_columns": 100}, {"tiles": 4}, {"temperature": 0.7}])
def test_it_is_the_same_function(options: dict[str, Any]) -> None:
    g = given(64, 300, torch.float64)
    results = []
    for invariant in (False, True):
        leaves = [g[name].clone().requires_grad_() for name in ("hidden", "weight")]
        bias = torch.linspace(-1, 1, 300, dtype=torch.float64, requires_grad=True)
        target, topk, mask = g["target"] % 290, g["topk"] % 290, torch.arange(TOKENS) % 3 > 0
        found = vocab_parallel.linear_token_statistics(
            *leaves, target, topk, 290, **options, bias=bias, loss_mask=mask, batch_invariant=invariant
        )  # fmt: skip
        (found.logprob + found.other_logprob).sum().backward()
        logits = (vocab_parallel.batch_invariant_logits if invariant else torch.nn.functional.linear)(*leaves)
        own = torch.autograd.grad((logits * torch.linspace(0, 1, 300, dtype=torch.float64)).sum(), leaves)
        gradients = [leaf.grad for leaf in (*leaves, bias)]
        results.append([found.logprob.detach(), found.entropy, *gradients, logits.detach(), *own])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_no_rows() -> None:
    logits = vocab_parallel.batch_invariant_logits(torch.zeros(0, 4), torch.zeros(9, 4))
    assert logits.shape == (0, 9)


def test_without_it_nothing_of_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise AssertionError("ran without batch_invariant")

    monkeypatch.setattr(vocab_parallel.linear, "invariant_mm", refuse)
    monkeypatch.setattr(vocab_parallel.collectives, "_ordered_reduce_scatter", refuse)
    g = given(64, 300, torch.float32)
    hidden = g["hidden"].requires_grad_()
    vocab_parallel.linear_token_statistics(hidden, g["weight"], g["target"]).logprob.sum().backward()
    assert hidden.grad is not None
