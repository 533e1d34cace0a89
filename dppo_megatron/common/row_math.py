"""The policy's arithmetic on a CPU, where the bits of a row do not depend on the rows beside it.

With `engine.exact` trainer and engines compute by it, one token at a time or a whole batch. Matrix libraries choose
their kernels, and with them the order of sums, by the number of rows; so products are made of tiles of one shape, in
fp32, rounded once, by one thread, for MKL may have several share the sum of an element. Sums over keys go by blocks of
one size from the first key on: what lies behind a query's last key adds exact zeros. In need of torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

ROWS = 32  # of a tile: more cost a single token more, fewer a long sequence
KEYS = 64  # of a block


def product(x: Float[Tensor, "... K"], weight: Float[Tensor, "K N"]) -> Float[Tensor, "... N"]:
    """x @ weight in fp32, rounded to the dtype of x."""
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    tiles = _tiled(rows.float())
    wide = weight.float().expand(len(tiles), *weight.shape)
    with _one_thread():
        out = torch.bmm(tiles, wide).flatten(0, 1)[:count]
    return out.to(x.dtype).view(*x.shape[:-1], weight.shape[1])


def _tiled(rows: Tensor) -> Tensor:
    """[T, K] -> [tiles, ROWS, K], zeros behind the last row."""
    return F.pad(rows, (0, 0, 0, -rows.shape[0] % ROWS)).view(-1, ROWS, rows.shape[1])


def rms_norm(x: Float[Tensor, "... d"], weight: Float[Tensor, " d"], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """w x / rms(x) in the dtype of x, and in fp32 x / rms(x) and 1 / rms(x) [..., 1]."""
    wide = x.float()
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square().div_(x.shape[-1])
    scale = mean_square.add_(eps).rsqrt_()
    normed = wide * scale
    return (normed * weight).to(x.dtype), normed, scale


def rope_tables(
    frequencies: Float[Tensor, " d/2"], position_ids: Int[Tensor, " T"], dtype: torch.dtype
) -> tuple[Float[Tensor, "T 1 d"], Float[Tensor, "T 1 d"]]:
    """Cosine, and sine with the sign of each half, of every row's angles; computed in fp32."""
    angles = torch.outer(position_ids.to(frequencies.dtype), frequencies)[:, None]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotated(x: Float[Tensor, "T h d"], cos: Tensor, sin: Tensor, direction: int = 1) -> Float[Tensor, "T h d"]:
    """The pairs (i, i + d/2) of each head, rotated by the row's angles; back with direction -1."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin, value=direction)


def attention(
    query: Float[Tensor, "n Q h d"],
    key: Float[Tensor, "n L g d"],
    value: Float[Tensor, "n L g v"],
    first: Int[Tensor, " n"],
    scale: float,
) -> Float[Tensor, "n Q h v"]:
    """Causal attention of queries at the positions first, first + 1, ... of their sequences, in fp32.

    h query heads share g of keys and values, which begin at position 0. Keys behind a query's position are not seen,
    whatever they hold; values there must be numbers.
    """
    n, queries, heads, d = query.shape
    groups, length = key.shape[2], key.shape[1]
    shared = heads // groups
    # Rows in the order of positions, so that whole tiles lie before a block of keys.
    rows = (query.float() * scale).view(n, queries, groups, shared, d).transpose(1, 2).reshape(n * groups, -1, d)
    count = rows.shape[1]
    rows = F.pad(rows, (0, 0, 0, -count % ROWS)).view(n * groups, -1, ROWS, d)
    tiles = rows.shape[1]
    positions = (first[:, None] + torch.arange(queries)).repeat_interleave(shared, dim=1)
    positions = F.pad(positions, (0, -count % ROWS)).repeat_interleave(groups, dim=0).view(n * groups, tiles, ROWS, 1)
    keys, values = (
        F.pad(x.float(), (0, 0, 0, 0, 0, -length % KEYS)).transpose(1, 2).reshape(n * groups, -1, KEYS, x.shape[-1])
        for x in (key, value)
    )
    keys = keys.transpose(2, 3).contiguous()
    last = int(first.max())
    top = rows.new_full((n * groups, tiles, ROWS, 1), float("-inf"))
    total = torch.zeros_like(top)
    out = rows.new_zeros(n * groups, tiles, ROWS, value.shape[-1])
    for block in range(keys.shape[1]):
        begin = max(0, (block * KEYS - last) * shared) // ROWS  # tiles before it see nothing of the block
        if begin >= tiles:
            break
        scores = _products(rows[:, begin:], keys[:, block])
        seen = torch.arange(block * KEYS, (block + 1) * KEYS) <= positions[:, begin:]
        scores = scores.masked_fill_(~seen, float("-inf"))
        before = top[:, begin:]
        now = torch.maximum(before, scores.amax(-1, keepdim=True))
        weights, fading = (scores - now).exp_(), (before - now).exp_()
        total[:, begin:] = total[:, begin:] * fading + weights.sum(-1, keepdim=True)
        out[:, begin:] = out[:, begin:] * fading + _products(weights, values[:, block])
        top[:, begin:] = now
    out = out.div_(total).view(n, groups, -1, value.shape[-1])[:, :, :count]
    out = out.view(n, groups, queries, shared, -1).transpose(1, 2).reshape(n, queries, heads, -1)
    return out.to(query.dtype)


def _products(tiles: Tensor, others: Tensor) -> Tensor:
    """[m, tiles, ROWS, a] with [m, a, b] -> [m, tiles, ROWS, b]."""
    m, count = tiles.shape[:2]
    others = others[:, None].expand(-1, count, -1, -1).reshape(m * count, *others.shape[1:])
    with _one_thread():
        return torch.bmm(tiles.reshape(m * count, *tiles.shape[2:]), others).view(m, count, ROWS, -1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch computes with one thread inside. Takes a microsecond."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
