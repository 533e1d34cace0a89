"""The Triton backend: the functions of torch_backend, one launch each.

The logits are read once forward, read once and written once backward. Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import torch_backend, triton_rows
from .merge import Coefficients, Merged, join_sums

# Columns of a tile: wide enough that a row is few iterations, small enough to stay in registers with 8 warps.
_TILE = 4096
_WARPS = 8
# Programs that fill a GPU a few times over; with fewer rows than that, a row is split between programs.
_PROGRAMS = 1024


@triton.jit
def _add_tile(
    z,
    column,
    start,
    m,
    s,
    u,
    tau,
    local,
    owned,
    ids,
    first,
    listed: tl.constexpr,
    tile: tl.constexpr,
    entropy: tl.constexpr,
):
    """m, s, u of a row after one more tile z, without the columns that the row's ids name."""
    inside = owned & (local >= start) & (local < start + tile)
    if tl.sum(inside.to(tl.int32), axis=0) > 0:
        for k in range(listed):
            # Scalar test first: only the ids of this tile are compared with its columns.
            hidden = tl.load(ids + k) - first
            if (hidden >= start) & (hidden < start + tile):
                z = tl.where(column == hidden, float("-inf"), z)
    top = tl.maximum(m, tl.max(z, axis=0))
    safe = tl.where(top == float("-inf"), 0.0, top)
    # Not tl.maximum: it may drop a NaN, which has to reach the sums to be reported.
    d = (z - safe) * tau
    d = tl.where(d < -1.0e4, -1.0e4, d)
    e = tl.exp(d)
    shift = (m - safe) * tau
    shift = tl.where(shift < -1.0e4, -1.0e4, shift)
    factor = tl.exp(shift)
    if entropy:
        u = factor * (u + shift * s) + tl.sum(d * e, axis=0)
    s = factor * s + tl.sum(e, axis=0)
    return top, s, u


@triton.jit
def _forward_kernel(
    logits,
    row_stride,
    column_stride,
    ids,
    first,
    columns,
    scale,
    scale_stride,
    scores,
    scores_stride,
    sums,
    sums_stride,
    tiles_per_split,
    listed: tl.constexpr,
    listed_padded: tl.constexpr,
    tile: tl.constexpr,
    entropy: tl.constexpr,
    acc: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    line = logits + row * row_stride
    ids += row * listed
    tau = tl.load(scale + row * scale_stride)

    slot = tl.arange(0, listed_padded)
    local = tl.load(ids + slot, mask=slot < listed, other=-1) - first
    owned = (slot < listed) & (local >= 0) & (local < columns)
    if split == 0:
        score = tl.load(line + local * column_stride, mask=owned, other=0.0)
        tl.store(scores + row * scores_stride + slot, score.to(acc), mask=slot < listed)

    m = tl.full((), float("-inf"), acc)
    s = tl.full((), 0.0, acc)
    u = tl.full((), 0.0, acc)
    begin = split * tiles_per_split
    full = columns // tile
    start = begin.to(tl.int64) * tile
    # Whole tiles without a mask: masked by an odd width, loads would not be vectorised.
    for _ in range(begin, tl.minimum(begin + tiles_per_split, full)):
        column = start + tl.arange(0, tile)
        z = tl.load(line + column * column_stride).to(acc)
        m, s, u = _add_tile(z, column, start, m, s, u, tau, local, owned, ids, first, listed, tile, entropy)
        start += tile
    if (begin <= full) & (full < begin + tiles_per_split) & (full * tile < columns):
        column = start + tl.arange(0, tile)
        z = tl.load(line + column * column_stride, mask=column < columns, other=float("-inf")).to(acc)
        m, s, u = _add_tile(z, column, start, m, s, u, tau, local, owned, ids, first, listed, tile, entropy)
    out = sums + row * sums_stride + split * 3
    tl.store(out, m)
    tl.store(out + 1, s)
    tl.store(out + 2, u)


@triton.jit
def _backward_kernel(
    logits,
    row_stride,
    column_stride,
    ids,
    first,
    columns,
    scale,
    scale_stride,
    other_max,
    at_listed,
    a,
    b,
    dead,
    listed: tl.constexpr,
    listed_padded: tl.constexpr,
    tile: tl.constexpr,
    with_b: tl.constexpr,
    acc: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1).to(tl.int64) * tile
    column = start + tl.arange(0, tile)
    where = logits + row * row_stride + column * column_stride
    whole = start + tile <= columns
    if whole:  # noqa: SIM108 (Triton compiles both sides of a conditional expression)
        z = tl.load(where).to(acc)
    else:
        z = tl.load(where, mask=column < columns, other=0.0).to(acc)
    d = (z - tl.load(other_max + row)) * tl.load(scale + row * scale_stride)
    d = tl.where(d < -1.0e4, -1.0e4, d)
    factor = tl.load(a + row) + tl.zeros_like(d)
    if with_b:
        factor += tl.load(b + row) * d
    gradient = tl.exp(d) * factor

    # Listed columns are replaced in registers: a second store to the same addresses would need a barrier.
    slot = tl.arange(0, listed_padded)
    local = tl.load(ids + row * listed + slot, mask=slot < listed, other=-1) - first
    inside = (slot < listed) & (local >= start) & (local < start + tile)
    if tl.sum(inside.to(tl.int32), axis=0) > 0:
        for k in range(listed):
            one = tl.load(ids + row * listed + k) - first
            if (one >= start) & (one < start + tile):
                gradient = tl.where(column == one, tl.load(at_listed + row * listed + k), gradient)
    gradient = tl.where(tl.load(dead + row) != 0, 0.0, gradient)
    gradient = gradient.to(logits.dtype.element_ty)
    if whole:
        tl.store(where, gradient)
    else:
        tl.store(where, gradient, mask=column < columns)


def _by_row(scale: float | Tensor, like: Tensor) -> tuple[Tensor, int]:
    """1/tau as a tensor and its stride over rows."""
    if isinstance(scale, Tensor):
        return scale.contiguous(), 1
    return torch.full((1,), scale, dtype=like.dtype, device=like.device), 0


def _accumulator(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _tile(columns: int) -> int:
    return min(_TILE, triton.next_power_of_2(columns))


def forward(
    block: Tensor,
    ids: Tensor,
    first: int,
    scale: float | Tensor,
    out: Tensor,
    *,
    entropy: bool,
    restore: bool,
    large: bool,
) -> None:
    """As torch_backend.forward; the block is only read, so restore and large have no meaning here."""
    tokens, columns = block.shape
    if tokens == 0:
        return
    n = ids.shape[1]
    tile = _tile(columns)
    tiles = triton.cdiv(columns, tile)
    splits = max(1, min(tiles, _PROGRAMS // tokens))
    per_split = triton.cdiv(tiles, splits)
    splits = triton.cdiv(tiles, per_split)
    sums = out[:, n:] if splits == 1 else out.new_empty((tokens, splits, 3))
    tau, tau_stride = _by_row(scale, out)
    with torch.cuda.device_of(block):
        _forward_kernel[(tokens, splits)](
            block,
            block.stride(0),
            block.stride(1),
            ids.contiguous(),
            first,
            columns,
            tau,
            tau_stride,
            out,
            out.stride(0),
            sums,
            sums.stride(0),
            per_split,
            listed=n,
            listed_padded=triton.next_power_of_2(n),
            tile=tile,
            entropy=entropy,
            acc=_accumulator(out.dtype),
            num_warps=_WARPS,
        )
    if splits > 1:
        out[:, n:] = join_sums(sums.transpose(0, 1), scale)


def backward(
    block: Tensor,
    ids: Tensor,
    first: int,
    scale: float | Tensor,
    other_max: Tensor,
    coefficients: Coefficients,
    dead: Tensor | None,
    *,
    large: bool,
) -> None:
    """As torch_backend.backward."""
    tokens, columns = block.shape
    if tokens == 0:
        return
    n = ids.shape[1]
    tile = _tile(columns)
    tau, tau_stride = _by_row(scale, other_max)
    mask = torch.zeros_like(other_max, dtype=torch.uint8) if dead is None else dead.to(torch.uint8)
    b = coefficients.b
    with torch.cuda.device_of(block):
        _backward_kernel[(tokens, triton.cdiv(columns, tile))](
            block,
            block.stride(0),
            block.stride(1),
            ids.contiguous(),
            first,
            columns,
            tau,
            tau_stride,
            other_max.contiguous(),
            coefficients.listed.contiguous(),
            coefficients.a.contiguous(),
            coefficients.a if b is None else b.contiguous(),
            mask,
            listed=n,
            listed_padded=triton.next_power_of_2(n),
            tile=tile,
            with_b=b is not None,
            acc=_accumulator(other_max.dtype),
            num_warps=_WARPS,
        )


def merge(rows: Tensor, ids: Tensor, scale: float | Tensor, entropy: bool) -> Merged:
    """As torch_backend.merge."""
    if rows.dtype != torch.float32 or ids.shape[1] > triton_rows.LONGEST_LIST:
        return torch_backend.merge(rows, ids, scale, entropy)
    return triton_rows.merge(rows, ids.contiguous(), _by_row(scale, rows), entropy)


def coefficients(
    merged: Merged,
    ids: Tensor,
    scale: float | Tensor,
    g_slots: Tensor,
    g_other: Tensor | None,
    g_entropy: Tensor | None,
) -> Coefficients:
    """As torch_backend.coefficients."""
    if merged.listed is not None:  # merged by the torch backend
        return torch_backend.coefficients(merged, ids, scale, g_slots, g_other, g_entropy)
    tau = _by_row(scale, merged.other_max)
    return triton_rows.coefficients(merged, ids.contiguous(), tau, g_slots, g_other, g_entropy)
