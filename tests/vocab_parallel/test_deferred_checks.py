"""Checks of many calls, read from the device together: the same errors, later, and no synchronisation before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dppo_megatron.vocab_parallel import DeferredChecks, TokenStatistics, linear_token_statistics, token_statistics
from tests.support.host_reads import HostRead, no_host_reads

TARGETS = torch.tensor([0, 1, 2])
WRONG = {
    "target": ({"target_ids": torch.tensor([0, 8, 1])}, r"target_ids must be within \[0, 8\).*the first at \[1\]"),
    "negative": ({"target_ids": torch.tensor([0, 1, -100])}, "found -100 to 1"),
    "topk": ({"topk_ids": torch.tensor([[1], [-2], [3]])}, r"topk_ids must be within \[-1, 8\)"),
    "padding": ({"vocab_size": 2}, r"target_ids must be within \[0, 2\)"),
    "temperature": ({"temperature": torch.tensor([1.0, -1.0, 1.0])}, "temperature.*1 are not, first at 1"),
    "mask": (
        {"sampling_mask_ids": torch.tensor([1, 2, 5]), "sampling_mask_counts": torch.tensor([1, 0, 2])},
        "1 target_ids are not in their row's sampling_mask_ids, the first at 0",
    ),
}


def stored(**changes: Any) -> TokenStatistics:
    return token_statistics(torch.randn(3, 8), **{"target_ids": TARGETS, **changes})


def fused(**changes: Any) -> TokenStatistics:
    return linear_token_statistics(torch.randn(3, 4), torch.randn(8, 4), **{"target_ids": TARGETS, **changes})


@pytest.fixture(params=[stored, fused])
def statistics(request) -> Callable[..., TokenStatistics]:
    return request.param


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_named_at_once_or_among_right_ones_when_they_are_read(statistics, name):
    changes, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        statistics(**changes)
    checks = DeferredChecks()
    for each in ({}, changes, {"topk_ids": TARGETS[:, None]}):
        statistics(check=checks, **each)
    with pytest.raises(ValueError, match=message):
        checks.raise_if_failed()
    checks.raise_if_failed()  # forgotten


def test_right_calls_pass(statistics):
    checks = DeferredChecks()
    checks.raise_if_failed()
    statistics(check=checks, temperature=torch.ones(3))
    empty = {"target_ids": TARGETS[:0], "topk_ids": TARGETS[:0, None], "temperature": torch.ones(0)}
    token_statistics(torch.randn(0, 8), check=checks, **empty)
    checks.raise_if_failed()


@pytest.mark.parametrize("entropy", ["none", "metric", "differentiable"])
def test_nothing_waits_for_the_device_until_they_are_read(statistics, entropy):
    checks = DeferredChecks()
    with no_host_reads():
        statistics(check=checks, entropy=entropy, topk_ids=TARGETS[:, None], temperature=torch.ones(3))
        with pytest.raises(HostRead):
            checks.raise_if_failed()
    with no_host_reads(), pytest.raises(HostRead):
        statistics()
