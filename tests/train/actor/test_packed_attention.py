"""Plans of packed attention; `test_shared_prefixes` compares its values with those of each sequence by itself."""

import pytest
import torch
import torch.nn.functional as F

from dppo_megatron.train.actor.batch.segments import plan_segments

LENGTHS = {
    "short": [3, 1, 16, 2, 9, 9, 16, 32],
    "mixed": [200, 1, 31, 33, 64, 50, 120, 7, 199],
    "one": [41],
    "equal": [8, 8, 8],
}


def bounds(lengths: list[int]) -> torch.Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


@pytest.mark.parametrize("name", LENGTHS)
def test_plan_holds_every_row_once(name):
    lengths = LENGTHS[name]
    plan = plan_segments(bounds(lengths))
    assert torch.equal(plan.pad_rows[plan.packed_rows], torch.arange(sum(lengths)))
    assert sum(n for n, _, _ in plan.groups) == len(lengths)
    assert len(plan.pad_rows) == sum(n * length for n, _, length in plan.groups)
    assert all(length <= 32 or length * n <= 2 * sum(lengths) for n, _, length in plan.groups)


def test_a_thousand_short_sequences_are_one_group():
    lengths = torch.randint(8, 17, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    assert [n for n, _, _ in plan_segments(bounds(lengths)).groups] == [1000]
