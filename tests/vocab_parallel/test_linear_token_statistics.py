"""linear_token_statistics against the float64 full-vocabulary reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dppo_megatron.vocab_parallel import linear, linear_token_statistics
from tests.support.ranks import Ranks
from tests.support.shards import CountCollectives, Largest
from tests.support.statistics_reference import Case, Inputs, make_inputs, reference, weighted

TOKENS, WIDTH, COLUMNS = 12, 8, 40
CASE = Case(seed=0, tokens=TOKENS, columns=(COLUMNS,), vocab=37, topk=5, temperature="tensor")


def build(dtype: torch.dtype, kept: bool = False) -> tuple[Inputs, dict[str, torch.Tensor], torch.Tensor]:
    """(ids, temperatures and weights; hidden, weight and bias; a loss mask)"""
    random = torch.Generator().manual_seed(0)
    shapes = {"hidden": (TOKENS, WIDTH), "weight": (COLUMNS, WIDTH), "bias": (COLUMNS,)}
    leaves = {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}
    return make_inputs(replace(CASE, kept=kept)), leaves, torch.rand(TOKENS, generator=random) > 0.4


def values(stats: Any) -> tuple[torch.Tensor, ...]:
    return (stats.logprob, stats.entropy, stats.topk_logprob, stats.other_logprob)


def stored(dtype: torch.dtype, use_mask: bool, bias: bool, kept: bool) -> dict[str, Any]:
    """Full vocabulary, float64 arithmetic on the given values, logits stored."""
    inputs, leaves, mask = build(dtype, kept)
    h, w, b = (leaf.double() for leaf in leaves.values())

    def masked(of_rows: torch.Tensor) -> torch.Tensor:
        return of_rows.masked_fill(~mask.view(-1, *[1] * (of_rows.dim() - 1)), 0.0) if use_mask else of_rows

    logits, weights = h @ w.t() + (b if bias else 0.0), tuple(map(masked, inputs.weights))
    found = reference(CASE, replace(inputs, logits=logits, weights=weights))
    g = found.gradient
    leaves = {"hidden": g @ w, "weight": g.t() @ h, "bias": g.sum(0) if bias else None}
    return {"values": list(map(masked, values(found)))} | leaves


def fused(
    rank: int, dtype: torch.dtype, use_mask: bool, bias: bool, sequence_parallel: bool, block: int | None, kept: bool
) -> dict[str, Any]:
    inputs, leaves, mask = build(dtype, kept)
    world = dist.get_world_size() if dist.is_initialized() else 1
    group = dist.group.WORLD if dist.is_initialized() else None
    columns = slice(rank * COLUMNS // world, (rank + 1) * COLUMNS // world)
    rows = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world) if sequence_parallel else slice(None)
    parts = {"hidden": rows, "weight": columns, "bias": columns}
    h, w, b = (leaves[name][part].clone().requires_grad_() for name, part in parts.items())
    with CountCollectives() as forward:
        stats = linear_token_statistics(
            h,
            w,
            inputs.target,
            inputs.topk,
            CASE.vocab,
            inputs.temperature,
            group,
            "differentiable",
            bias=b if bias else None,
            loss_mask=mask if use_mask else None,
            sequence_parallel=sequence_parallel,
            block_columns=block,
            sampling_mask_ids=inputs.sampling_mask_ids,
            sampling_mask_counts=inputs.sampling_mask_counts,
        )
    loss = weighted(values(stats), inputs.weights, True)
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
    compare(fused(0, dtype, use_mask, bias, False, block, kept), stored(dtype, use_mask, bias, kept), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_mask", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_ranks(ranks: Ranks, dtype: torch.dtype, use_mask: bool, sequence_parallel: bool, kept: bool) -> None:
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
    compare(found, stored(dtype, use_mask, True, kept), dtype)


def test_tied_embedding_receives_both_gradients() -> None:
    torch.manual_seed(0)
    table = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([1, 5, 7])
    linear_token_statistics(table[ids], table, ids).logprob.sum().backward()
    again = table.detach().clone().requires_grad_()
    torch.log_softmax(again[ids] @ again.t(), dim=1).gather(1, ids.unsqueeze(1)).sum().backward()
    assert torch.allclose(table.grad, again.grad, atol=1e-12)


def test_frozen_head() -> None:
    inputs, leaves, _ = build(torch.float32)
    hidden = leaves["hidden"].requires_grad_()
    linear_token_statistics(hidden, leaves["weight"], inputs.target).logprob.sum().backward()
    assert torch.isfinite(hidden.grad).all()
    assert leaves["weight"].grad is None


@pytest.mark.parametrize("keep", [0, 1, TOKENS])
def test_few_tokens_carry_loss(keep: int) -> None:
    inputs, leaves, _ = build(torch.float32)
    hidden = leaves["hidden"].requires_grad_()
    mask = torch.arange(TOKENS) < keep
    stats = linear_token_statistics(hidden, leaves["weight"], inputs.target, inputs.topk, loss_mask=mask)
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
