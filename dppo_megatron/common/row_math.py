"""Compute rows so that a row's bits do not depend on the other rows. Depends only on torch.

With `engine.exact`, trainer and engines use this module on CPUs, for one token or a whole batch. The batch-invariant
head (`vocab_parallel`) uses `product`, on GPUs too. A matrix library chooses its kernel, and so the order of its sums,
by the number of rows. Here every product has the same number of rows. A single CPU thread computes a product, because
MKL may let several threads share an element's sum. Attention sums over key blocks of equal size, from the first key on;
keys after a query's position add exact zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

ROWS = 32  # rows per tile: a larger tile slows down a single token, a smaller tile a long sequence
KEYS = 64  # keys per block


@torch.no_grad()
def product(
    x: Float[Tensor, "... K"],
    weight: Float[Tensor, "K N"],
    bias: Float[Tensor, " N"] | None = None,
    *,
    tile: int = ROWS,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "... N"]:
    """Return x @ weight + bias, computed in `dtype` and rounded once to x's dtype, without gradient.

    The rows are multiplied in tiles of `tile` rows; zeros fill the last tile. Example: 70 rows with `tile` 32 are
    products of 32, 32 and 6 + 26 rows, so the library chooses the same kernel for each. A row's bits do not depend on
    other rows if that kernel treats all rows in a tile alike. tests/common/test_row_math.py checks this on CPUs.
    """
    rows, weight = x.reshape(-1, x.shape[-1]).to(dtype).contiguous(), weight.to(dtype)
    count = len(rows)
    out = rows.new_empty((-(-count // tile) * tile, weight.shape[1]))
    with _one_thread() if rows.is_cpu else nullcontext():
        for start in range(0, count, tile):
            part = rows[start : start + tile]
            if len(part) < tile:
                part = F.pad(part, (0, 0, 0, tile - len(part)))
            if bias is None:
                torch.mm(part, weight, out=out[start : start + tile])
            else:
                torch.addmm(bias, part, weight, out=out[start : start + tile])
    return out[:count].to(x.dtype).view(*x.shape[:-1], weight.shape[1])


def rms_norm(x: Float[Tensor, "... d"], weight: Float[Tensor, " d"], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (w x / rms(x) in x's dtype, x / rms(x) in fp32, 1 / rms(x) [..., 1] in fp32)."""
    wide = x.float()
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square().div_(x.shape[-1])
    scale = mean_square.add_(eps).rsqrt_()
    normed = wide * scale
    return (normed * weight).to(x.dtype), normed, scale


def rope_tables(
    frequencies: Float[Tensor, " d/2"], position_ids: Int[Tensor, " T"], dtype: torch.dtype
) -> tuple[Float[Tensor, "T 1 d"], Float[Tensor, "T 1 d"]]:
    """Return cosine and sine of every row's angles, computed in fp32; the first half of the sine is negated."""
    angles = torch.outer(position_ids.to(frequencies.dtype), frequencies)[:, None]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotated(x: Float[Tensor, "T h d"], cos: Tensor, sin: Tensor, direction: int = 1) -> Float[Tensor, "T h d"]:
    """Rotate the pairs (i, i + d/2) in each head by the row's angles; `direction` -1 rotates back."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin, value=direction)


def attention(
    query: Float[Tensor, "n Q h d"],
    key: Float[Tensor, "n L g d"],
    value: Float[Tensor, "n L g v"],
    first: Int[Tensor, " n"],
    scale: float,
) -> Float[Tensor, "n Q h v"]:
    """Return causal attention for queries at positions first, first + 1, ... in their sequences, computed in fp32.

    h query heads share g heads of keys and values, which begin at position 0. Keys after a query's position are
    ignored; the values there must be finite.
    """
    n, queries, heads, d = query.shape
    groups, length = key.shape[2], key.shape[1]
    shared = heads // groups
    # Rows are in position order, so that all rows in the first tiles precede a block of keys.
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
        begin = max(0, (block * KEYS - last) * shared) // ROWS  # queries in earlier tiles precede all keys in the block
        if begin >= tiles:
            break
        scores = _products(rows[:, begin:], keys[:, block])
        causal_mask = torch.arange(block * KEYS, (block + 1) * KEYS) <= positions[:, begin:]
        scores = scores.masked_fill_(~causal_mask, float("-inf"))
        old_max = top[:, begin:]
        new_max = torch.maximum(old_max, scores.amax(-1, keepdim=True))
        weights, fading = (scores - new_max).exp_(), (old_max - new_max).exp_()
        total[:, begin:] = total[:, begin:] * fading + weights.sum(-1, keepdim=True)
        out[:, begin:] = out[:, begin:] * fading + _products(weights, values[:, block])
        top[:, begin:] = new_max
    out = out.div_(total).view(n, groups, -1, value.shape[-1])[:, :, :count]
    out = out.view(n, groups, queries, shared, -1).transpose(1, 2).reshape(n, queries, heads, -1)
    return out.to(query.dtype)


def _products(tiles: Tensor, matrices: Tensor) -> Tensor:
    """Multiply [m, tiles, ROWS, a] by [m, a, b] to [m, tiles, ROWS, b]."""
    m, count = tiles.shape[:2]
    matrices = matrices[:, None].expand(-1, count, -1, -1).reshape(m * count, *matrices.shape[1:])
    with _one_thread():
        return torch.bmm(tiles.reshape(m * count, *tiles.shape[2:]), matrices).view(m, count, ROWS, -1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread inside the context. Switching takes a microsecond."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
