"""The torch replacement of SGLang's native hash gives the values of MurmurHash3_x86_32's reference implementation."""

import pytest
import torch

from dppo_megatron.rollout.engines.sglang.cpu.seeded_sampling import murmur_hash32


@pytest.mark.parametrize(
    ("seed", "position", "column", "expected"), [(0, 0, 0, 2167721464), (2**62 + 12345, 77, 5, 3748115772)]
)
def test_hash(seed, position, column, expected):
    columns = torch.arange(8)
    hashed = murmur_hash32(torch.tensor([seed], dtype=torch.uint64), torch.tensor([position]), columns)
    assert hashed.shape == (1, 8)
    assert hashed[0, column].item() == expected
