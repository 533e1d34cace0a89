"""A row has the same bits by itself, among others, at every place and with any number of threads."""

import pytest
import torch
import torch.nn.functional as F

from dppo_megatron.common.row_math import KEYS, ROWS, attention, product, rms_norm, rope_tables, rotated

DTYPES = (torch.float32, torch.bfloat16)
AGREE = {torch.float32: 2e-6, torch.bfloat16: 0.02}


@pytest.fixture(autouse=True)
def threads():
    """Restores the process's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def beside_others(row: torch.Tensor, before: int, behind: int) -> torch.Tensor:
    others = noise(before + behind, row.shape[-1], dtype=row.dtype, seed=before + behind)
    return torch.cat((others[:before], row, others[before:]))


# The head's shapes: hidden [T, H] by the transposed weight, then the gradient [T, V] by the weight.
HEAD = [(8, 37), (8, 3142), (512, 37), (1024, 128)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "columns", "options", "transposed"),
    [
        *((*size, {}, True) for size in ((160, 480), (448, 160), (64, 64), (100, 33), (1024, 512))),
        *((*size, {"tile": 128}, True) for size in HEAD),
        *((columns, width, {"tile": 128}, False) for width, columns in HEAD),
    ],
)
def test_a_product_of_a_row(dtype, width, columns, options, transposed):
    """The last tile is nearly empty, and nearly full; one thread or two."""
    tile = options.get("tile", ROWS)
    options = options | {"dtype": dtype} if options else {}
    weight = noise(columns, width, dtype=dtype, seed=1).t() / width**0.5
    weight = weight if transposed else weight.contiguous()
    row = noise(1, width, dtype=dtype)
    alone = product(row, weight, **options)
    torch.testing.assert_close(alone.float(), row.float() @ weight.float(), atol=AGREE[dtype], rtol=AGREE[dtype])
    for before, behind, count in ((0, 1, 1), (1, 0, 2), (tile - 1, 3, 1), (tile, 0, 2), (77, 300, 2), (3, 251, 2)):
        torch.set_num_threads(count)
        assert torch.equal(product(beside_others(row, before, behind), weight, **options)[before], alone[0])


def test_a_product_of_all_rows_at_once_differs():
    """The reason for tiles. If this fails they may not be needed any more."""
    rows, weight = noise(257, 64), noise(300, 64, seed=1).t()
    assert not torch.equal(rows @ weight, torch.cat([row @ weight for row in rows.split(1)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 40, 160, 896])
def test_a_norm_of_a_row(dtype, width):
    weight, row = noise(width, dtype=dtype, seed=1), noise(1, width, dtype=dtype)
    alone = rms_norm(row, weight, 1e-6)[0]
    expected = F.rms_norm(row.float(), (width,), weight.float(), 1e-6)
    torch.testing.assert_close(alone.float(), expected, atol=2 * AGREE[dtype], rtol=AGREE[dtype])
    for before, behind in ((0, 1), (13, 0), (500, 40)):
        assert torch.equal(rms_norm(beside_others(row, before, behind), weight, 1e-6)[0][before], alone[0])


def test_a_rotary_angle_does_not_depend_on_the_other_positions():
    frequencies = 1.0 / 1000.0 ** (torch.arange(0, 32, 2) / 32)
    of_all = rope_tables(frequencies, torch.arange(301), torch.float32)
    x = noise(301, 2 * 32).view(301, 2, 32)
    for position in (0, 1, 7, 300):
        table = rope_tables(frequencies, torch.tensor([position]), torch.float32)
        assert all(torch.equal(a[position], b[0]) for a, b in zip(of_all, table, strict=True))
        assert torch.equal(rotated(x, *of_all)[position], rotated(x[position : position + 1], *table)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 32), (3, 3, 40), (6, 1, 16)])
@pytest.mark.parametrize("length", [1, KEYS, 3 * KEYS + 7])
def test_attention_of_a_token_is_that_of_the_whole_sequence(dtype, heads, groups, width, length):
    query = noise(2, length, heads * width, dtype=dtype, seed=1).view(2, length, heads, width)
    key, value = (noise(2, length, groups * width, dtype=dtype, seed=s).view(2, length, groups, width) for s in (2, 3))
    zeros = torch.zeros(2, dtype=torch.long)
    whole = attention(query, key, value, zeros, width**-0.5)
    wide = (x.float().transpose(1, 2) for x in (query, key, value))
    expected = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(whole.float(), expected, atol=AGREE[dtype], rtol=AGREE[dtype])
    behind = key.new_full((1, 50, groups, width), 3.0)
    for position in {0, length // 2, length - 1}:
        for n in (0, 1):
            seen = slice(0, position + 1)
            one = query[n : n + 1, position : position + 1]
            keys, values = (torch.cat((x[n : n + 1, seen], behind), dim=1) for x in (key, value))
            alone = attention(one, keys, values, torch.tensor([position]), width**-0.5)
            assert torch.equal(alone[0, 0], whole[n, position])
    # Of a prompt that is read in two parts, and of two sequences of different lengths at once.
    half = length // 2
    rest = attention(query[:, half:], key, value, zeros + half, width**-0.5)
    assert torch.equal(rest, whole[:, half:])
    last = torch.tensor([length - 1, half])
    both = attention(query[torch.arange(2), last][:, None], key, value, last, width**-0.5)
    assert torch.equal(both[:, 0], whole[torch.arange(2), last])
