"""Statistics over sampling masks: bits, rows without loss, rejected arguments, and the logits afterwards."""

from typing import Any

import pytest
import torch

from dppo_megatron.vocab_parallel import linear_token_statistics, token_statistics

IDS = torch.tensor([4, 1, 6, 0, 5])
COUNTS = torch.tensor([3, 0, 2])
TARGET = torch.tensor([1, 2, 0])


def given() -> torch.Tensor:
    return torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("inplace", [False, True])
def test_the_same_bits_as_infinities_in_the_logits(inplace: bool):
    """A sampling mask gives the same results as logits of -inf outside the set."""
    gradients = []
    for kept in ({}, {"sampling_mask_ids": IDS, "sampling_mask_counts": COUNTS}):
        leaf = given().float().requires_grad_()
        logits = leaf * 1.0
        if not kept:
            inside = torch.zeros(3, 8, dtype=torch.bool)
            inside[torch.arange(3).repeat_interleave(COUNTS), IDS] = True
            logits = logits.masked_fill(~inside & (COUNTS > 0)[:, None], -torch.inf)
        stats = token_statistics(logits, TARGET, vocab_size=7, inplace=inplace, **kept)
        assert bool(torch.isinf(logits).any()) == (inplace or not kept)
        stats.logprob.sum().backward()
        gradients.append((stats.logprob.detach(), stats.entropy, leaf.grad))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_rows_without_loss_are_not_restricted():
    mask = torch.tensor([True, True, False])
    target = torch.where(mask, TARGET, -100)
    stored = token_statistics(given(), target, loss_mask=mask, sampling_mask_ids=IDS, sampling_mask_counts=COUNTS)
    hidden, weight = given()[:, :4], given().t()[:, :3].repeat(1, 2)[:, :4]
    fused = linear_token_statistics(
        hidden, weight, target, loss_mask=mask, sampling_mask_ids=IDS, sampling_mask_counts=COUNTS
    )
    again = token_statistics(
        (hidden @ weight.t())[:2], TARGET[:2], sampling_mask_ids=IDS[:3], sampling_mask_counts=COUNTS[:2]
    )
    assert torch.allclose(fused.logprob[:2], again.logprob, atol=1e-14)
    assert not stored.nonfinite.any()
    assert not fused.logprob[2]
    assert not stored.logprob[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling_mask_counts": None}, "sampling_mask_ids and sampling_mask_counts belong together"),
        ({"sampling_mask_counts": COUNTS[:2]}, r"sampling_mask_counts must be \[T\] with T = 3"),
        ({"sampling_mask_counts": COUNTS + 1}, "sampling_mask_counts add up to 8, expected 5"),
        ({"sampling_mask_counts": torch.tensor([3, -1, 3])}, "sampling_mask_counts are partly negative"),
        ({"sampling_mask_ids": IDS.float()}, "sampling_mask_ids must be int32 or int64"),
        ({"sampling_mask_ids": IDS + 3}, r"sampling_mask_ids must be within \[0, 8\), found 3 to 9"),
        (
            {"target_ids": torch.tensor([2, 2, 1])},
            "2 target_ids are not in their row's sampling_mask_ids, the first at 0",
        ),
    ],
)
def test_wrong_sets(changes: dict[str, Any], message: str):
    arguments = {"target_ids": TARGET, "sampling_mask_ids": IDS, "sampling_mask_counts": COUNTS} | changes
    with pytest.raises((ValueError, TypeError), match=message):
        token_statistics(given(), **arguments)


def test_a_list_with_a_token_outside_the_sampling_set_is_reported():
    topk = torch.tensor([[2], [3], [5]])
    stats = token_statistics(given(), TARGET, topk, sampling_mask_ids=IDS, sampling_mask_counts=COUNTS)
    assert stats.nonfinite.tolist() == [True, False, False]
