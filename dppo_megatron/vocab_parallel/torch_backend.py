"""Implements the torch backend.

A backend is a module with four functions. `forward` and `backward` pass over a vocabulary block: `forward` fills the
rows that the collective transfers, and `backward` turns logits into their gradient. `merge` and `coefficients` do the
arithmetic on [T, n] between these passes.

Eager code works on a few rows at a time, so that the fp32 scratch stays in cache and does not grow with T. Large blocks
go through torch.compile, which needs no scratch. Example: a block of [1000, 5000] on a CPU. Eager takes 1 << 17
elements at once, 26 rows, in 39 slices of 25 or 26 rows. Compiled code (from 8,192 columns on) would sum 20,000 columns
as three pieces of 6,656, 6,672 and 6,672 columns, for 142 or 143 rows at a time, and merge the pieces in order.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .compiled import CompiledOrEager
from .merge import FLOOR, Coefficients, coefficients, join_sums, merge
from .topk import local_slots

__all__ = ["accumulation_dtype", "backward", "coefficients", "forward", "merge"]

# Elements processed at once. Eager: 512 KB of fp32 scratch stays in a CPU core's cache, and a GPU runs faster with
# fewer, larger launches. Compiled: both sweeps of a CPU kernel find their rows in cache. A GPU takes the whole block.
_EAGER_CPU = 1 << 17
_EAGER_GPU = 1 << 24
_COMPILED_CPU = 1 << 20
# Inductor's CPU sums lose 4e-6 over 150,000 columns, torch's sums do not. So Inductor sums this many columns, and torch
# sums the pieces.
_SUMMED_AT_ONCE = 1 << 13


def _pieces(block: Tensor, elements: int) -> list[slice]:
    """Return slices of about `elements` elements with at least 2 rows; their row counts differ by at most 1.

    With a single row, torch would split the sum over threads, and Dynamo would specialize and compile again.
    """
    rows = block.shape[0]
    step = max(1, elements // max(1, block.shape[1]))
    count = min(-(-rows // step), max(1, rows // 2))
    return [slice(i * rows // count, (i + 1) * rows // count) for i in range(count)]


def _eager_pieces(block: Tensor) -> list[slice]:
    return _pieces(block, _EAGER_CPU if block.device.type == "cpu" else _EAGER_GPU)


def _compiled_pieces(block: Tensor) -> list[slice]:
    return _pieces(block, _COMPILED_CPU if block.device.type == "cpu" else block.numel())


def _twice(row: Tensor) -> Tensor:
    """Repeat [1, ...] to [2, ...], so that a single row is computed like a row among several."""
    return row.expand(2, *row.shape[1:]).contiguous()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which logits of `dtype` are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _column_bounds(block: Tensor) -> list[int]:
    """Return where to cut the columns: pieces of about _SUMMED_AT_ONCE on a CPU, starting at multiples of 16."""
    columns = block.shape[1]
    count = -(-columns // _SUMMED_AT_ONCE) if block.device.type == "cpu" else 1
    return [i * columns // count // 16 * 16 for i in range(count)] + [columns]


def _scale_of(scale: float | Tensor, rows: slice) -> float | Tensor:
    return scale[rows].unsqueeze(1) if isinstance(scale, Tensor) else scale


def _sums_eager(block: Tensor, scale: float | Tensor, out: Tensor, entropy: bool) -> None:
    acc = out.dtype
    for rows in _eager_pieces(block):
        z = block[rows]
        m = z.amax(dim=1, keepdim=True).to(acc)
        out[rows, 0:1] = m
        d = z - m.masked_fill_(m == float("-inf"), 0.0)
        if not (isinstance(scale, float) and scale == 1.0):
            d.mul_(_scale_of(scale, rows))
        if not entropy:
            torch.sum(d.exp_(), dim=1, out=out[rows, 1])
            continue
        # The clamp comes later, because on a CPU exp(FLOOR) takes four times as long as exp(-inf).
        e = d.exp()
        torch.sum(e, dim=1, out=out[rows, 1])
        torch.sum(e.mul_(d.clamp_min_(FLOOR)), dim=1, out=out[rows, 2])


def _sums(block: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    m = block.amax(dim=1).to(scale.dtype)
    safe = m.masked_fill(m == float("-inf"), 0.0)
    d = (block.to(scale.dtype) - safe.unsqueeze(1)) * scale.unsqueeze(1)
    return m, d.exp().sum(dim=1)


def _sums_with_entropy(block: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m = block.amax(dim=1).to(scale.dtype)
    safe = m.masked_fill(m == float("-inf"), 0.0)
    d = ((block.to(scale.dtype) - safe.unsqueeze(1)) * scale.unsqueeze(1)).clamp_min(FLOOR)
    e = d.exp()
    return m, e.sum(dim=1), (e * d).sum(dim=1)


_compiled_sums = CompiledOrEager(_sums)
_compiled_sums_with_entropy = CompiledOrEager(_sums_with_entropy)


def block_sums(block: Tensor, scale: float | Tensor, out: Tensor, entropy: bool, compiled: bool) -> None:
    """Write m, s and (with entropy) u, defined in merge.py, into out[:, 0..2].

    block: [T, columns > 0], the slots' columns set to -inf.
    out: [T, 3], fp32 or float64.
    scale: 1/tau.
    compiled: use torch.compile if it works here.
    """
    if block.shape[0] == 1:
        sums = _twice(out)
        block_sums(_twice(block), _twice(scale) if isinstance(scale, Tensor) else scale, sums, entropy, compiled)
        out.copy_(sums[:1])
        return None
    kernel = _compiled_sums_with_entropy if entropy else _compiled_sums
    if compiled and kernel.usable:
        tensor = scale if isinstance(scale, Tensor) else out.new_full((block.shape[0],), scale)
        bounds = _column_bounds(block)
        sums = out.new_zeros((len(bounds) - 1, *out.shape))
        for piece, (first, last) in zip(sums, pairwise(bounds), strict=True):
            columns = block[:, first:last]
            for rows in _compiled_pieces(columns):
                results = kernel(columns[rows], tensor[rows])
                if results is None:
                    return _sums_eager(block, scale, out, entropy)
                for k, result in enumerate(results):
                    piece[rows, k] = result
        out.copy_(sums[0] if len(sums) == 1 else join_sums(sums, scale))
        return None
    return _sums_eager(block, scale, out, entropy)


def _gradient_eager(
    block: Tensor, other_max: Tensor, scale: float | Tensor, a: Tensor, b: Tensor | None, dead: Tensor | None
) -> None:
    for rows in _eager_pieces(block):
        z = block[rows]
        d = z - other_max[rows].unsqueeze(1)
        if not (isinstance(scale, float) and scale == 1.0):
            d.mul_(_scale_of(scale, rows))
        if b is None:
            d.exp_().mul_(a[rows].unsqueeze(1))
        else:
            e = d.exp()
            d.clamp_min_(FLOOR).mul_(b[rows].unsqueeze(1)).add_(a[rows].unsqueeze(1)).mul_(e)
        if dead is not None:
            d.masked_fill_(dead[rows].unsqueeze(1), 0.0)
        z.copy_(d)


def _gradient(block: Tensor, other_max: Tensor, scale: Tensor, a: Tensor, dead: Tensor) -> None:
    d = (block.to(scale.dtype) - other_max.unsqueeze(1)) * scale.unsqueeze(1)
    block.copy_((d.exp() * a.unsqueeze(1)).masked_fill(dead.unsqueeze(1), 0.0))


def _gradient_with_entropy(block: Tensor, other_max: Tensor, scale: Tensor, a: Tensor, b: Tensor, dead: Tensor) -> None:
    d = ((block.to(scale.dtype) - other_max.unsqueeze(1)) * scale.unsqueeze(1)).clamp_min(FLOOR)
    block.copy_((d.exp() * (a.unsqueeze(1) + b.unsqueeze(1) * d)).masked_fill(dead.unsqueeze(1), 0.0))


_compiled_gradient = CompiledOrEager(_gradient)
_compiled_gradient_with_entropy = CompiledOrEager(_gradient_with_entropy)


def block_gradient(block: Tensor, scale: float | Tensor, coefficients: Coefficients, compiled: bool) -> None:
    """Overwrite the logits block [T, columns > 0] by e^d (a + b d), d = (z - other_max) scale, and 0 in dead rows.

    The values are correct for columns that no slot names. The caller then writes the slots' columns.
    compiled: as in block_sums.
    """
    other_max, a, b, dead = coefficients.other_max, coefficients.a, coefficients.b, coefficients.dead
    kernel = _compiled_gradient if b is None else _compiled_gradient_with_entropy
    if compiled and kernel.usable:
        tensor = scale if isinstance(scale, Tensor) else a.new_full(a.shape, scale)
        mask = torch.zeros(a.shape, dtype=torch.bool, device=a.device) if dead is None else dead
        by_row = [other_max, tensor, a, mask] if b is None else [other_max, tensor, a, b, mask]
        if block.shape[0] == 1:
            pair = _twice(block)
            if kernel(pair, *map(_twice, by_row), returns=False) is not None:
                block.copy_(pair[:1])
                return
        for number, rows in enumerate(_compiled_pieces(block)):
            if kernel(block[rows], *(argument[rows] for argument in by_row), returns=False) is None:
                if number:  # eager code would read the gradients that replace some logits as logits
                    raise RuntimeError("compilation failed after gradients had replaced some logits; repeat the step")
                break
        else:
            return
    _gradient_eager(block, other_max, scale, a, b, dead)


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
    """Fill out [T, n + 3] with the logit of each slot in the block (0 for other slots), then m, s, u.

    block: [T, columns > 0] logits of columns [first, first + columns). The slots' columns become -inf during the call;
    `restore` restores the old bits at the end. `compiled.worthwhile` describes `large`.
    """
    n = ids.shape[1]
    slots = local_slots(ids, first, block.shape[1])
    hidden = slots.hide(block)
    try:
        out[:, :n] = hidden.masked_fill(~slots.inside, 0.0)
        block_sums(block, scale, out[:, n:], entropy, compiled=large)
    finally:
        if restore:
            slots.show(block, hidden)


def backward(
    block: Tensor,
    ids: Tensor,
    first: int,
    scale: float | Tensor,
    coefficients: Coefficients,
    *,
    large: bool,
) -> None:
    """Overwrite the logits block [T, columns > 0] by the gradient."""
    block_gradient(block, scale, coefficients, compiled=large)
    local_slots(ids, first, block.shape[1]).put(block, coefficients.slots)
