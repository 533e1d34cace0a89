"""linear_token_statistics against token_statistics of stored logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dppo_megatron.vocab_parallel import linear, linear_token_statistics, token_statistics
from tests.support.ranks import Ranks
from tests.support.shards import CountCollectives, Largest
from tests.support.statistics_reference import weighted

TOKENS, WIDTH, COLUMNS, VOCAB, K = 12, 8, 40, 37, 5


def build(dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((TOKENS,), (TOKENS,), (TOKENS, K), (TOKENS,))
    target = torch.randint(0, VOCAB, (TOKENS,), generator=random)
    topk = torch.randint(-1, VOCAB, (TOKENS, K), generator=random)
    inside = torch.rand(TOKENS, VOCAB, generator=random) < 0.3
    inside[torch.arange(TOKENS), target] = True
    topk[~inside.gather(1, topk.clamp_min(0))] = -1
    inside[2::3] = False  # such a row is over the whole vocabulary
    return {
        "kept": {"sampling_mask_ids": inside.nonzero()[:, 1], "sampling_mask_counts": inside.sum(dim=1)},
        "hidden": torch.randn(TOKENS, WIDTH, generator=random).to(dtype),
        "weight": torch.randn(COLUMNS, WIDTH, generator=random).to(dtype),
        "bias": torch.randn(COLUMNS, generator=random).to(dtype),
        "target": target,
        "topk": topk,
        "temperature": torch.rand(TOKENS, generator=random) + 0.5,
        "mask": torch.rand(TOKENS, generator=random) > 0.4,
        "weights": tuple(torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes),
    }


def values(stats: Any) -> tuple[torch.Tensor, ...]:
    return (stats.logprob, stats.entropy, stats.topk_logprob, stats.other_logprob)


def stored(given: dict[str, Any], mask: torch.Tensor | None, bias: bool, kept: bool = False) -> dict[str, torch.Tensor]:
    """Full vocabulary, float64 arithmetic on the given values, logits stored."""
    h, w, b = (given[name].double().requires_grad_() for name in ("hidden", "weight", "bias"))
    logits = h @ w.t() + (b if bias else 0.0)
    stats = token_statistics(
        logits,
        given["target"],
        given["topk"],
        VOCAB,
        given["temperature"].double(),
        None,
        "differentiable",
        **(given["kept"] if kept else {}),
    )
    keep = torch.ones(TOKENS, dtype=torch.bool) if mask is None else mask
    found = tuple(value.masked_fill(~keep.view(-1, *[1] * (value.dim() - 1)), 0.0) for value in values(stats))
    weighted(found, given["weights"], True).backward()
    return {"values": [v.detach() for v in found], "hidden": h.grad, "weight": w.grad, "bias": b.grad if bias else None}


def fused(
    rank: int,
    dtype: torch.dtype,
    use_mask: bool,
    bias: bool,
    sequence_parallel: bool,
    block: int | None,
    kept: bool = False,
) -> dict[str, Any]:
    given = build(dtype)
    world = dist.get_world_size() if dist.is_initialized() else 1
    group = dist.group.WORLD if dist.is_initialized() else None
    columns = slice(rank * COLUMNS // world, (rank + 1) * COLUMNS // world)
    rows = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world) if sequence_parallel else slice(None)
    h = given["hidden"][rows].clone().requires_grad_()
    w, b = (given[name][columns].clone().requires_grad_() for name in ("weight", "bias"))
    with CountCollectives() as forward:
        stats = linear_token_statistics(
            h,
            w,
            given["target"],
            given["topk"],
            VOCAB,
            given["temperature"],
            group,
            "differentiable",
            bias=b if bias else None,
            loss_mask=given["mask"] if use_mask else None,
            sequence_parallel=sequence_parallel,
            block_columns=block,
            **(given["kept"] if kept else {}),
        )
    loss = weighted(values(stats), given["weights"], True)
    with CountCollectives() as backward:
        loss.backward()
    return {
        "values": [v.detach() for v in values(stats)],
        "hidden": h.grad,
        "weight": w.grad,
        "bias": b.grad,
        "forward": sum(forward.found.values()),
        "backward": sum(backward.found.values()),
    }


def compare(found: dict[str, Any], wanted: dict[str, Any], dtype: torch.dtype) -> None:
    exact = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 0.1}[dtype]
    for a, b in zip(found["values"], wanted["values"], strict=True):
        finite = torch.isfinite(b)
        assert torch.equal(finite, torch.isfinite(a))
        assert torch.allclose(a[finite].double(), b[finite], atol=exact, rtol=exact)
    relative = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype]
    for name in ("hidden", "weight", "bias"):
        if wanted[name] is None:
            assert found[name] is None
            continue
        error = (found[name].double() - wanted[name]).abs().max()
        assert error <= relative * wanted[name].abs().max(), f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_mask", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("block", [None, 1, 7])
@pytest.mark.parametrize("kept", [False, True])
def test_one_process(dtype: torch.dtype, use_mask: bool, bias: bool, block: int | None, kept: bool) -> None:
    given = build(dtype)
    found = fused(0, dtype, use_mask, bias, False, block, kept)
    compare(found, stored(given, given["mask"] if use_mask else None, bias, kept), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_mask", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_ranks(ranks: Ranks, dtype: torch.dtype, use_mask: bool, sequence_parallel: bool, kept: bool) -> None:
    given = build(dtype)
    arguments = {"dtype": dtype, "use_mask": use_mask, "bias": True, "block": 7, "kept": kept}
    results = ranks.run(fused, sequence_parallel=sequence_parallel, **arguments)
    for result in results:
        for mine, theirs in zip(result["values"], results[0]["values"], strict=True):
            assert torch.equal(mine, theirs)
        # One for the statistics; the head's own: hidden gathered, and its gradient reduced.
        assert result["forward"] == (2 if sequence_parallel else 1)
        assert result["backward"] == 1
    if not sequence_parallel:
        assert all(torch.equal(result["hidden"], results[0]["hidden"]) for result in results)
    hidden = torch.cat([r["hidden"] for r in results]) if sequence_parallel else results[0]["hidden"]
    joined = {name: torch.cat([result[name] for result in results]) for name in ("weight", "bias")}
    found = {"values": results[0]["values"], "hidden": hidden} | joined
    compare(found, stored(given, given["mask"] if use_mask else None, True, kept), dtype)


def test_gradcheck() -> None:
    given = build(torch.float64)
    inputs = tuple(
        given[name][:rows].clone().requires_grad_() for name, rows in (("hidden", 3), ("weight", 9), ("bias", 9))
    )
    target, topk = torch.tensor([0, 8, 3]), torch.tensor([[1, 2], [-1, 8], [3, 3]])

    def function(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        stats = linear_token_statistics(
            h, w, target, topk, temperature=0.8, entropy="differentiable", bias=b, block_columns=4
        )
        return tuple(value.masked_fill(torch.isinf(value), 0.0) for value in values(stats))

    assert torch.autograd.gradcheck(function, inputs)


def test_tied_embedding_receives_both_gradients() -> None:
    torch.manual_seed(0)
    table = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([1, 5, 7])
    linear_token_statistics(table[ids], table, ids).logprob.sum().backward()
    again = table.detach().clone().requires_grad_()
    torch.log_softmax(again[ids] @ again.t(), dim=1).gather(1, ids.unsqueeze(1)).sum().backward()
    assert torch.allclose(table.grad, again.grad, atol=1e-12)


def test_frozen_head() -> None:
    given = build(torch.float32)
    hidden = given["hidden"].requires_grad_()
    linear_token_statistics(hidden, given["weight"], given["target"]).logprob.sum().backward()
    assert torch.isfinite(hidden.grad).all()
    assert given["weight"].grad is None


@pytest.mark.parametrize("keep", [0, 1, TOKENS])
def test_few_tokens_carry_loss(keep: int) -> None:
    given = build(torch.float32)
    hidden = given["hidden"].requires_grad_()
    mask = torch.arange(TOKENS) < keep
    stats = linear_token_statistics(hidden, given["weight"], given["target"], given["topk"], loss_mask=mask)
    stats.logprob.sum().backward()
    assert (stats.logprob[~mask] == 0).all()
    assert (stats.topk_logprob[~mask] == 0).all()
    assert (hidden.grad[~mask] == 0).all()
    assert not keep or (hidden.grad[mask] != 0).any()


def test_logits_are_never_stored() -> None:
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(20000, 4, requires_grad=True)
    target = torch.randint(0, 20000, (64,))
    with Largest() as seen:
        linear_token_statistics(hidden, weight, target).logprob.sum().backward()
    assert seen.nbytes < 4 * 64 * 20000 / 8


@pytest.mark.parametrize("vocab", [50257, 32064, 151936, 128256, 15361, 1000])
@pytest.mark.parametrize("world", [1, 2, 8])
def test_blocks_are_cut_where_a_matrix_product_is_aligned(vocab: int, world: int) -> None:
    columns = -(-vocab // (128 * world)) * 128
    for valid in {min(columns, vocab), max(0, vocab - columns * (world - 1))}:
        cuts = linear.column_blocks(valid)
        assert [i for cut in cuts for i in range(cut.start, cut.stop)] == list(range(valid))
        assert all(cut.start % 64 == 0 for cut in cuts)
        assert len(cuts) <= 16
        widths = [cut.stop - cut.start for cut in cuts]
        assert max(widths, default=0) - min(widths, default=0) < 128
        assert max(widths, default=0) < max(1024, valid / 16) + 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(9, 5)}, r"hidden \[3, 4\] and weight \[9, 5\] differ in H: 4 and 5"),
        ({"weight": torch.zeros(9, 4, dtype=torch.bfloat16)}, "weight .* must match hidden"),
        ({"bias": torch.zeros(8)}, r"bias must be \[V_local\] = \[9\]"),
        ({"loss_mask": torch.ones(3)}, "loss_mask must be bool"),
        ({"block_columns": 0}, "block_columns must be positive"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    arguments = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(9, 4), "target_ids": torch.tensor([0, 1, 2])}
    with pytest.raises(ValueError, match=message):
        linear_token_statistics(**(arguments | changes))
