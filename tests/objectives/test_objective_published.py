"""Every preset without a worked case against its published loss, on packed responses with padding and extremes."""

import pytest
import torch

from tests.objectives.published_axes import EVERY, check


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("label", EVERY)
def test_loss_and_gradient_are_the_published_ones(label, dtype):
    for seed in range(6):
        check(label, seed, dtype)
