"""Packed attention against each sequence by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from dppo_megatron.actor.batch.packing import PackedSequences
from dppo_megatron.actor.local.attention import PackedAttention
from dppo_megatron.actor.local.operators import rotate
from dppo_megatron.actor.local.segments import plan_segments
from dppo_megatron.common.row_math import rope_tables

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


def test_empty_sequences_are_refused():
    with pytest.raises(ValueError, match="empty"):
        plan_segments(torch.tensor([0, 3, 3, 5]))


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("with_rope", [False, True])
def test_equal_to_each_sequence_by_itself(name, with_rope):
    lengths = LENGTHS[name]
    total, heads, groups, size = sum(lengths), 4, 2, 16
    generator = torch.Generator().manual_seed(0)

    def leaf(count: int) -> torch.Tensor:
        return torch.randn(total, count, size, generator=generator, dtype=torch.float64, requires_grad=True)

    query, key, value = leaf(heads), leaf(groups), leaf(groups)
    upstream = torch.randn(total, heads * size, generator=generator, dtype=torch.float64)
    positions = torch.cat([torch.arange(n) for n in lengths])
    frequencies = 1.0 / 100.0 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    rope = rope_tables(frequencies, positions, torch.float64) if with_rope else None

    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=heads)
    attention = PackedAttention(config, layer_number=1)
    packed = PackedSequences(qkv_format="thd", plan=plan_segments(bounds(lengths)), rope=rope)
    out = attention(query, key, value, None, packed_seq_params=packed)
    got = torch.autograd.grad(out, (query, key, value), upstream)

    expected = torch.cat(
        [_alone(query[a:b], key[a:b], value[a:b], frequencies if with_rope else None) for a, b in _spans(lengths)]
    )
    torch.testing.assert_close(out, expected)
    for mine, theirs in zip(got, torch.autograd.grad(expected, (query, key, value), upstream), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_rotation_depends_on_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 16, generator=generator, dtype=torch.float64)
    frequencies = 1.0 / 100.0 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)

    def product(at: int, other: int) -> torch.Tensor:
        a = rotate(q, *rope_tables(frequencies, torch.tensor([at]), torch.float64))
        b = rotate(k, *rope_tables(frequencies, torch.tensor([other]), torch.float64))
        return (a * b).sum()

    torch.testing.assert_close(product(7, 3), product(40, 36))
    assert not torch.isclose(product(7, 3), product(7, 4))


def _spans(lengths: list[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, frequencies: torch.Tensor | None) -> torch.Tensor:
    if frequencies is not None:
        angles = torch.arange(len(q))[:, None] * frequencies
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]

        def turned(x: torch.Tensor) -> torch.Tensor:
            pairs = torch.complex(*x.chunk(2, dim=-1)) * turn
            return torch.cat((pairs.real, pairs.imag), dim=-1)

        q, k = turned(q), turned(k)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = scores.masked_fill(later, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
    return out[0].transpose(0, 1).flatten(1)
