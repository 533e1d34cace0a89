"""A row's statistics and gradient are the same bits whatever rows stand beside it, at any number of threads."""

from __future__ import annotations

import shutil

import pytest
import torch

from dppo_megatron.vocab_parallel import merge, token_statistics

TOKENS, PARTS = 83, (1, 2, 3, 7, 32)
COMPILER = shutil.which("g++") or shutil.which("clang++")


def rows_of(logits: torch.Tensor, rows: slice, entropy: str) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropy and gradient of these rows, computed by themselves."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(0, logits.shape[1], (TOKENS,), generator=generator)[rows]
    weight = torch.randn(TOKENS, generator=generator)[rows]
    part = logits[rows].clone().requires_grad_()
    found = token_statistics(part, target, logits[rows].float().topk(20).indices, temperature=0.7, entropy=entropy)
    loss = (found.logprob * weight).sum() + (found.topk_logprob.sum(dim=1) * weight).sum()
    if entropy == "differentiable":
        loss = loss + (found.entropy * weight).sum()
    loss.backward()
    return found.logprob.detach(), found.topk_logprob.detach(), found.entropy.detach(), part.grad


SMALL = [(300, torch.float32, "metric"), (5000, torch.bfloat16, "differentiable")]
COMPILED = [(50_257, torch.float32, "metric"), (152_064, torch.bfloat16, "differentiable")]


@pytest.mark.parametrize(
    ("columns", "dtype", "entropy"),
    [*SMALL, *(pytest.param(*case, marks=pytest.mark.slow) for case in COMPILED if COMPILER)],
)
def test_rows_alone_and_beside_others(columns: int, dtype: torch.dtype, entropy: str) -> None:
    logits = (torch.randn(TOKENS, columns, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    before = torch.get_num_threads()
    whole = rows_of(logits, slice(0, TOKENS), entropy)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for size in PARTS:
                rows = slice(5, 5 + size)
                for one, other in zip(whole, rows_of(logits, rows, entropy), strict=True):
                    assert torch.equal(one[rows], other), f"{size} rows on {threads} threads"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("blocks", [2, 5, 16])
def test_blocks_are_joined_in_order(blocks: int) -> None:
    sums = torch.rand(blocks, 4096, 3, generator=torch.Generator().manual_seed(0))
    whole = merge.join_sums(sums, 0.7)
    for size in PARTS:
        assert torch.equal(whole[:size], merge.join_sums(sums[:, :size], 0.7))
