"""Implements the Triton backend: the functions in torch_backend, with one launch each.

The forward pass reads the logits once; the backward pass reads and writes them once. Importing this module requires
Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import torch_backend, triton_rows
from .merge import Coefficients, Merged

# Columns in a tile: wide enough that a row takes few iterations, small enough to stay in registers with 8 warps.
TILE = 4096
WARPS = 8
# Neighboring columns that a thread loads at once: 16 bytes of bf16.
CHUNK = 8


@triton.jit
def _without(z, place, offset, tile: tl.constexpr):
    """Return z with -inf in the columns at `offset` [up to 32, a power of 2].

    32 offsets take one register per thread in a warp, and the warp finds the minimum by itself. More offsets are
    processed 32 at a time.
    """
    if offset.shape[1] > 1:
        left, right = tl.split(tl.reshape(offset, (offset.shape[0], offset.shape[1] // 2, 2)))
        z = _without(z, place, left, tile)
        z = _without(z, place, right, tile)
    else:
        pending = tl.reshape(offset, (offset.shape[0],))
        pending = tl.where((pending >= 0) & (pending < tile), pending, tile)
        column = tl.min(pending, axis=0)
        # The loop runs once per id in the tile. Comparing all ids with every column would cost 5 times the rest.
        while column < tile:
            z = tl.where(place == column, float("-inf"), z)
            pending = tl.where(pending == column, tile, pending)
            column = tl.min(pending, axis=0)
    return z


@triton.jit
def _add_tile(z, place, m, s, u, scale, offset, tile: tl.constexpr, entropy: tl.constexpr):
    """Return a row's m, s, u [lanes] after another tile z [lanes, chunk], without the columns that `offset` names.

    Each lane has separate sums, so that no thread waits for another inside the loop over tiles.
    place: [lanes, chunk] int32, the columns' offsets inside the tile.
    offset: int32, the offsets of the row's ids, see `_without`. Offsets outside the tile are ignored.
    scale: log2(e) / tau, so u is in units of ln 2.
    """
    z = _without(z, place, offset, tile)
    top = tl.maximum(m, tl.max(z, axis=1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    d = (z - tl.expand_dims(safe, 1)) * scale
    e = tl.exp2(d)
    shift = (m - safe) * scale
    factor = tl.exp2(shift)
    if entropy:
        # -inf times 0 would be NaN. The maximum drops a NaN here; s reports the NaN.
        u = factor * (u + tl.maximum(shift, -2.0e4) * s) + tl.sum(tl.maximum(d, -2.0e4) * e, axis=1)
    s = factor * s + tl.sum(e, axis=1)
    return top, s, u


@triton.jit
def forward_kernel(
    logits,
    row_stride,
    column_stride,
    ids,
    first,
    columns,
    scale,
    scale_stride,
    out,
    out_stride,
    n: tl.constexpr,
    n_padded: tl.constexpr,
    tile: tl.constexpr,
    chunk: tl.constexpr,
    entropy: tl.constexpr,
    acc: tl.constexpr,
):
    # Each row has one program, even if there are few rows: a split would merge sums in an order that depends on T. An
    # SM runs 8 programs of 8 warps, so about a thousand rows fill a GPU. Fewer rows take about as long as a single row:
    # 38 loads in sequence for 152,064 columns, tens of microseconds, less than the surrounding launches.
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    summary = out + row * out_stride
    log2 = tl.load(scale + row * scale_stride) * 1.4426950408889634

    slot = tl.arange(0, n_padded)
    local = tl.load(ids + row * n + slot, mask=slot < n, other=-1) - first
    is_local = (slot < n) & (local >= 0) & (local < columns)

    lanes: tl.constexpr = tile // chunk
    place = tl.expand_dims(tl.arange(0, lanes) * chunk, 1) + tl.expand_dims(tl.arange(0, chunk), 0)
    m = tl.full((lanes,), float("-inf"), acc)
    s = tl.zeros((lanes,), acc)
    u = tl.zeros((lanes,), acc)
    full = columns // tile
    together: tl.constexpr = 32 if n_padded > 32 else n_padded
    offset = tl.where(is_local, local, -1).to(tl.int32)
    offset = tl.reshape(offset, (together, n_padded // together))
    where = line + place * column_stride
    # Whole tiles are loaded without a mask, because a mask of odd width prevents vectorized loads.
    for _ in range(full):
        z = tl.load(where).to(acc)
        m, s, u = _add_tile(z, place, m, s, u, log2, offset, tile, entropy)
        where += tile * column_stride
        offset -= tile
    if full * tile < columns:
        z = tl.load(where, mask=place < columns - full * tile, other=float("-inf")).to(acc)
        m, s, u = _add_tile(z, place, m, s, u, log2, offset, tile, entropy)

    # Loading before the loop would cost 50 instead of 38 instructions per local id (ptxas, sm100, 21 ids, entropy).
    score = tl.load(line + local * column_stride, mask=is_local, other=0.0)
    tl.store(summary + slot, score.to(acc), mask=slot < n)
    top = tl.max(m, axis=0)
    shift = (m - tl.where(top == float("-inf"), 0.0, top)) * log2
    w = tl.exp2(shift)
    tl.store(summary + n, top)
    tl.store(summary + n + 1, tl.sum(w * s, axis=0))
    if entropy:
        u = w * (u + tl.maximum(shift, -2.0e4) * s) * 0.6931471805599453
    tl.store(summary + n + 2, tl.sum(u, axis=0))


@triton.jit
def backward_kernel(
    logits,
    row_stride,
    column_stride,
    ids,
    first,
    columns,
    scale,
    scale_stride,
    other_max,
    at_slots,
    a,
    b,
    dead,
    n: tl.constexpr,
    n_padded: tl.constexpr,
    tile: tl.constexpr,
    with_b: tl.constexpr,
    acc: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * tile
    place = tl.arange(0, tile)
    line = logits + row * row_stride + start.to(tl.int64) * column_stride
    where = line + place * column_stride
    inside = columns - start
    live = tl.load(dead + row) == 0
    whole = tile <= inside
    if whole:  # noqa: SIM108 (Triton compiles both sides of a conditional expression)
        z = tl.load(where).to(acc)
    else:
        z = tl.load(where, mask=place < inside, other=0.0).to(acc)
    tau = tl.load(scale + row * scale_stride)
    d = (z - tl.load(other_max + row)) * tau
    if with_b:
        d = tl.where(d < -1.0e4, -1.0e4, d)
        gradient = tl.exp2(d * 1.4426950408889634) * (tl.load(a + row) + tl.load(b + row) * d)
    else:
        gradient = tl.exp2((z - tl.load(other_max + row)) * (tau * 1.4426950408889634)) * tl.load(a + row)
    gradient = tl.where(live, gradient, 0.0).to(logits.dtype.element_ty)
    if whole:
        tl.store(where, gradient)
    else:
        tl.store(where, gradient, mask=place < inside)

    # Top-K columns overwrite values in the tile that other threads of this program may have stored.
    slot = tl.arange(0, n_padded)
    local = tl.load(ids + row * n + slot, mask=slot < n, other=-1) - first - start
    is_local = (slot < n) & (local >= 0) & (local < tl.minimum(inside, tile))
    if tl.sum(is_local.to(tl.int32), axis=0) > 0:
        tl.debug_barrier()
        value = tl.load(at_slots + row * n + slot, mask=is_local, other=0.0)
        value = tl.where(live, value, 0.0).to(logits.dtype.element_ty)
        tl.store(line + local * column_stride, value, mask=is_local)


def _by_row(scale: float | Tensor, like: Tensor) -> tuple[Tensor, int]:
    """Return 1/tau as a tensor, and the tensor's stride over rows."""
    if isinstance(scale, Tensor):
        return scale.contiguous(), 1
    return torch.full((1,), scale, dtype=like.dtype, device=like.device), 0


def _arguments(
    block: Tensor, ids: Tensor, first: int, scale: float | Tensor, like: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the first positional arguments and the keyword arguments that both kernels take."""
    n, columns = ids.shape[1], block.shape[1]
    sizes = {
        "n": n,
        "n_padded": triton.next_power_of_2(n),
        "tile": min(TILE, triton.next_power_of_2(columns)),
        "acc": tl.float64 if like.dtype == torch.float64 else tl.float32,
        "num_warps": WARPS,
    }
    return (block, *block.stride(), ids.contiguous(), first, columns, *_by_row(scale, like)), sizes


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
    """Implement torch_backend.forward; the block is only read, so restore and large have no effect."""
    if len(block) == 0:
        return
    common, sizes = _arguments(block, ids, first, scale, out)
    with torch.cuda.device_of(block):
        forward_kernel[(len(block),)](
            *common, out, out.stride(0), chunk=min(CHUNK, sizes["tile"]), entropy=entropy, **sizes
        )


def backward(
    block: Tensor,
    ids: Tensor,
    first: int,
    scale: float | Tensor,
    coefficients: Coefficients,
    *,
    large: bool,
) -> None:
    """Implement torch_backend.backward."""
    if len(block) == 0:
        return
    other_max, dead, b = coefficients.other_max, coefficients.dead, coefficients.b
    common, sizes = _arguments(block, ids, first, scale, other_max)
    mask = torch.zeros_like(other_max, dtype=torch.uint8) if dead is None else dead.to(torch.uint8)
    with torch.cuda.device_of(block):
        backward_kernel[(len(block), triton.cdiv(block.shape[1], sizes["tile"]))](
            *common,
            other_max.contiguous(),
            coefficients.slots.contiguous(),
            coefficients.a.contiguous(),
            coefficients.a if b is None else b.contiguous(),
            mask,
            with_b=b is not None,
            **sizes,
        )


def merge(rows: Tensor, ids: Tensor, scale: float | Tensor, entropy: bool) -> Merged:
    """Implement torch_backend.merge."""
    if rows.dtype != torch.float32 or ids.shape[1] > triton_rows.MAX_SLOTS:
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
    """Implement torch_backend.coefficients."""
    if merged.slots is not None:  # merged by the torch backend
        return torch_backend.coefficients(merged, ids, scale, g_slots, g_other, g_entropy)
    tau = _by_row(scale, merged.other_max)
    return triton_rows.coefficients(merged, ids.contiguous(), tau, g_slots, g_other, g_entropy)
