"""With `tiles`, statistics and gradients have the same bits at every tensor-parallel size."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dppo_megatron.vocab_parallel import linear_token_statistics, token_statistics
from tests.support.ranks import TORCH, RankError, Ranks

COMPILER = shutil.which("g++") or shutil.which("clang++")
TILES, WIDTH = 4, 16
NAMES = ("logprob", "entropy", "topk_logprob", "other_logprob")


def on_rank(
    rank: int, head: str, tokens: int, columns: int, vocab: int, dtype: torch.dtype, **options: Any
) -> dict[str, torch.Tensor]:
    """Statistics and gradients of one rank of any number. `head`: logits, or fused."""
    group = dist.group.WORLD if dist.is_initialized() else None
    world = 1 if group is None else dist.get_world_size(group)
    own = slice(rank * columns // world, (rank + 1) * columns // world)
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(tokens, columns, generator=generator) * 3).to(dtype)
    weight = torch.randn(columns, WIDTH, generator=generator).to(dtype)
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(dtype)
    ids = torch.randint(0, vocab, (tokens, 6), generator=generator)
    scale = torch.randn(tokens, generator=generator)
    common: dict[str, Any] = {"topk_ids": ids[:, 1:], "vocab_size": vocab, "temperature": 0.7, "group": group}
    common |= {"entropy": "differentiable", **options}
    if head == "logits":
        leaves = [logits[:, own].clone().requires_grad_()]
        found = token_statistics(leaves[0], ids[:, 0], **common)
    else:
        leaves = [hidden.clone().requires_grad_(), weight[own].clone().requires_grad_()]
        found = linear_token_statistics(*leaves, ids[:, 0], batch_invariant=True, **common)
    losses = found.logprob + found.entropy + found.other_logprob + found.topk_logprob.sum(dim=1)
    (losses * scale).sum().backward()
    values = {name: getattr(found, name).detach() for name in NAMES}
    names = ("logits",) if head == "logits" else ("hidden", "weight")
    return values | {name: leaf.grad for name, leaf in zip(names, leaves, strict=True)}


@pytest.fixture(scope="module")
def two_and_four() -> Iterator[list[Ranks]]:
    with Ranks(2, "gloo", TORCH) as two, Ranks(4, "gloo", TORCH) as four:
        yield [two, four]


# The last of four shards is all padding; and tiles wide enough to be compiled.
SMALL = [(600, 440, torch.float32), (600, 571, torch.bfloat16)]
LARGE = [(50_688, 50_257, torch.float32)]


@pytest.mark.parametrize("head", ["logits", "fused"])
@pytest.mark.parametrize(
    ("columns", "vocab", "dtype"),
    [*SMALL, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE if COMPILER)],
)
def test_same_bits_at_every_size(
    two_and_four: list[Ranks], head: str, columns: int, vocab: int, dtype: torch.dtype
) -> None:
    case = {"head": head, "tokens": 33, "columns": columns, "vocab": vocab, "dtype": dtype, "tiles": TILES}
    one = on_rank(0, **case)
    for ranks in two_and_four:
        found = ranks.run(on_rank, **case)
        for name in NAMES:
            assert all(torch.equal(one[name], each[name]) for each in found), f"{name} at TP {ranks.size}"
        if head == "logits":
            assert torch.equal(one["logits"], torch.cat([each["logits"] for each in found], dim=1)), ranks.size
        else:
            # Each rank's part of the hidden gradient is rounded, and then they are added: not the same bits.
            assert torch.equal(one["weight"], torch.cat([each["weight"] for each in found])), ranks.size
            close = {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps * float(one["hidden"].abs().max())}
            torch.testing.assert_close(one["hidden"], found[0]["hidden"], **close)


def test_without_tiles_sizes_differ(two_and_four: list[Ranks]) -> None:
    """Without `tiles` each rank is one block of the sum."""
    case = {"head": "logits", "tokens": 33, "columns": 600, "vocab": 571, "dtype": torch.float32}
    one, two = on_rank(0, **case), two_and_four[0].run(on_rank, **case)[0]
    assert not torch.equal(one["entropy"], two["entropy"])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_hidden_gradients_do_not_depend_on_other_rows(two_and_four: list[Ranks], sequence_parallel: bool) -> None:
    """Over four ranks, where a ring would start its sums at another rank for another place in the buffer."""
    found = two_and_four[1].run(_alone_and_together, sequence_parallel=sequence_parallel)
    for whole, part, rows in found:
        assert torch.equal(whole[rows], part)


def _alone_and_together(rank: int, sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor, slice]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(size, WIDTH, generator=generator) for size in (256, 400))
    target = torch.randint(0, 400, (256,), generator=generator)

    def of(rows: slice) -> torch.Tensor:
        """Hidden gradient of these rows; with sequence_parallel each rank's share of them."""
        share = slice(None)
        if sequence_parallel:
            count = (rows.stop - rows.start) // 4
            share = slice(rank * count, (rank + 1) * count)
        leaf = hidden[rows][share].clone().requires_grad_()
        found = linear_token_statistics(
            leaf,
            weight[100 * rank : 100 * (rank + 1)],
            target[rows],
            group=dist.group.WORLD,
            sequence_parallel=sequence_parallel,
            batch_invariant=True,
        )
        found.logprob.sum().backward()
        return leaf.grad

    whole, part = of(slice(0, 256)), of(slice(20, 56))
    if not sequence_parallel:
        return whole, part, slice(20, 56)
    shares = [torch.empty_like(whole) for _ in range(4)]
    dist.all_gather(shares, whole)
    return torch.cat(shares), part, slice(20 + 9 * rank, 20 + 9 * (rank + 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiles": 0}, "tiles must be a positive int"),
        ({"tiles": 7}, r"tiles=7 does not divide 1 shard\(s\) of 12 columns; pad the vocabulary"),
        ({"tiles": 3, "vocab_start": 0}, "tiles=3 requires shards of equal size; omit vocab_start"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_statistics(torch.zeros(2, 12), torch.tensor([0, 1]), **options)


def _three_tiles(rank: int) -> None:
    token_statistics(torch.zeros(2, 6), torch.tensor([0, 1]), group=dist.group.WORLD, tiles=3)


def test_tiles_that_ranks_cannot_share(two_and_four: list[Ranks]) -> None:
    with pytest.raises(RankError, match="tiles=3 must be a multiple of the 2 ranks"):
        two_and_four[0].run(_three_tiles)
