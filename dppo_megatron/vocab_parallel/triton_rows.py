"""Implements merge.py in Triton: one launch in each direction, instead of about a hundred, for [T] and [T, n].

On a GPU these launches, not the arithmetic, would take most of the time for a small shard. merge.py explains the
formulas; the results agree up to rounding. Supports only fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .merge import Coefficients, Merged

# Registers hold all pairs of ids to compare, so the number of ids is limited.
MAX_SLOTS = 64


@triton.jit
def _log1p(x):
    # Near 1 the GPU's log has a small absolute but a large relative error. This series, 2 artanh(x / (2 + x)), is good
    # to 1e-9 for |x| <= 1/2.
    t = x / (2.0 + x)
    q = t * t
    p = 1.0 / 13 + q * (1.0 / 15 + q * (1.0 / 17))
    p = 1.0 / 7 + q * (1.0 / 9 + q * (1.0 / 11 + q * p))
    p = 1.0 + q * (1.0 / 3 + q * (1.0 / 5 + q * p))
    return tl.where(tl.abs(x) <= 0.5, 2.0 * t * p, tl.log(1.0 + x))


@triton.jit
def _expm1(x):
    p = 1.0 + x / 7 * (1.0 + x / 8 * (1.0 + x / 9))
    p = 1.0 + x / 4 * (1.0 + x / 5 * (1.0 + x / 6 * p))
    p = x * (1.0 + x / 2 * (1.0 + x / 3 * p))
    return tl.where(x > -0.5, p, tl.exp(x) - 1.0)


@triton.jit
def _floor(x):
    """Clamp to merge.py's FLOOR; NaN stays NaN."""
    return tl.where(x < -1.0e4, -1.0e4, x)


@triton.jit
def _nonfinite(x):
    return (x - x) != 0.0


@triton.jit
def _merge_kernel(
    rows,
    block_stride,
    row_stride,
    ids,
    scale,
    scale_stride,
    logprob,
    other_logprob,
    entropy,
    nonfinite,
    slot_mass,
    other_max,
    other_sum,
    blocks: tl.constexpr,
    n: tl.constexpr,
    padded: tl.constexpr,
    with_entropy: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, padded)
    valid = slot < n
    tau = tl.load(scale + row * scale_stride)
    name = tl.load(ids + row * n + slot, mask=valid, other=-1)
    present = valid & (name >= 0)
    line = rows + row * row_stride

    scores = tl.zeros((padded,), tl.float32)
    top = tl.full((), float("-inf"), tl.float32)
    for block in range(blocks):
        base = line + block * block_stride
        scores += tl.load(base + slot, mask=valid, other=0.0)
        m = tl.load(base + n)
        top = tl.where((m > top) | (m != m), m, top)
    top = tl.where(top == float("-inf"), 0.0, top)
    s = tl.full((), 0.0, tl.float32)
    u = tl.full((), 0.0, tl.float32)
    for block in range(blocks):
        base = line + block * block_stride + n
        d = _floor((tl.load(base) - top) * tau)
        w = tl.exp(d)
        part = tl.load(base + 1)
        s += w * part
        if with_entropy:
            u += w * (tl.load(base + 2) + d * part)

    same = tl.expand_dims(name, 1) == tl.expand_dims(name, 0)
    twin = tl.min(tl.where(same, tl.expand_dims(slot, 0), padded), axis=1)
    counted = present & (twin == slot)
    candidates = tl.where(counted, scores, float("-inf"))
    slot_max = tl.max(candidates, axis=0)
    leader = tl.min(tl.where(candidates == slot_max, slot, padded), axis=0)
    empty = s == 0.0
    best_other = tl.where(empty, float("-inf"), top)
    best = tl.maximum(slot_max, best_other)
    d_slots = (scores - best) * tau
    e = tl.where(counted, tl.exp(d_slots), 0.0)
    d_other = (top - best) * tau
    w_other = tl.where(empty, 0.0, tl.exp(d_other))
    mass_other = w_other * s
    leads = slot_max >= best_other
    leading = slot == tl.where(leads, leader, padded)
    led = tl.sum(tl.where(leading, e, 0.0), axis=0)
    tail = tl.sum(tl.where(leading, 0.0, e), axis=0)
    rest = tl.where(leads, mass_other, mass_other - 1.0) + tail
    log_s = _log1p(rest)
    total = rest + 1.0
    mass = (tail + led) / total
    direct = d_other + tl.log(s) - log_s

    bad = tl.sum((present & _nonfinite(scores)).to(tl.int32), axis=0) > 0
    bad = bad | _nonfinite(log_s) | _nonfinite(best)
    tl.store(logprob + row * n + slot, tl.where(present, d_slots - log_s, float("-inf")), mask=valid)
    tl.store(other_logprob + row, tl.where(mass < 0.5, _log1p(-mass), direct))
    tl.store(nonfinite + row, bad.to(tl.int8))
    tl.store(slot_mass + row, mass)
    tl.store(other_max + row, top)
    tl.store(other_sum + row, s)
    if with_entropy:
        total_u = w_other * (u + _floor(d_other) * s) + tl.sum(_floor(d_slots) * e, axis=0)
        tl.store(entropy + row, log_s - total_u / total)


@triton.jit
def _coefficients_kernel(
    g_slots,
    g_other,
    g_entropy,
    ids,
    scale,
    scale_stride,
    logprob,
    other_logprob,
    entropy,
    nonfinite,
    slot_mass,
    other_sum,
    at_slots,
    a_out,
    b_out,
    n: tl.constexpr,
    padded: tl.constexpr,
    with_other: tl.constexpr,
    with_entropy: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, padded)
    valid = slot < n
    tau = tl.load(scale + row * scale_stride)
    name = tl.load(ids + row * n + slot, mask=valid, other=-1)
    flag = tl.load(nonfinite + row)
    skip = flag != 0
    live = valid & (tl.where(flag == 0, name, -1) >= 0)
    s = tl.load(other_sum + row)
    dead = skip | (s == 0.0)
    safe = tl.where(s == 0.0, 1.0, s)

    grads = tl.where(live, tl.load(g_slots + row * n + slot, mask=valid, other=0.0), 0.0)
    g_sum = tl.sum(grads, axis=0)
    same = tl.expand_dims(name, 1) == tl.expand_dims(name, 0)
    g = tl.sum(tl.where(same, tl.expand_dims(grads, 0), 0.0), axis=1)
    lp = tl.load(logprob + row * n + slot, mask=valid, other=float("-inf"))
    lpo = tl.load(other_logprob + row)
    pi = tl.exp(lp)
    pi_other = tl.exp(lpo)
    all_g = g_sum
    a = -pi_other * g_sum
    if with_other:
        go = tl.where(dead, 0.0, tl.load(g_other + row))
        all_g += go
        a += go * tl.load(slot_mass + row)
    grad = -g * _expm1(lp) - pi * (all_g - g)
    if with_entropy:
        h = tl.where(skip, 0.0, tl.load(g_entropy + row))
        mean = tl.load(entropy + row)
        grad -= h * pi * (_floor(lp) + mean)
        b = -h * pi_other
        a += b * (_floor(lpo) + mean) - b * tl.log(safe)
        tl.store(b_out + row, tl.where(dead, 0.0, b / safe * tau))
    tl.store(a_out + row, tl.where(dead, 0.0, a / safe * tau))
    tl.store(at_slots + row * n + slot, tl.where(live, grad * tau, 0.0), mask=valid)


def merge(rows: Tensor, ids: Tensor, tau: tuple[Tensor, int], entropy: bool) -> Merged:
    """Implement merge.merge; rows [blocks, T, n + 3] in fp32, n <= MAX_SLOTS. tau: (1/tau, its stride over rows)."""
    blocks, tokens, width = rows.shape
    n = width - 3
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    logprob = rows.new_empty((tokens, n))
    by_row = rows.new_empty((5, tokens))
    other_logprob, mass, other_max, other_sum, mean = by_row.unbind()
    nonfinite = torch.empty(tokens, dtype=torch.bool, device=rows.device)
    if tokens:
        with torch.cuda.device_of(rows):
            _merge_kernel[(tokens,)](
                rows,
                rows.stride(0),
                rows.stride(1),
                ids,
                *tau,
                logprob,
                other_logprob,
                mean,
                nonfinite.view(torch.int8),
                mass,
                other_max,
                other_sum,
                blocks=blocks,
                n=n,
                padded=triton.next_power_of_2(n),
                with_entropy=entropy,
                num_warps=1 if n <= 32 else 4,
            )
    return Merged(logprob, other_logprob, mean if entropy else None, nonfinite, mass, other_max, other_sum, None)


def coefficients(
    merged: Merged,
    ids: Tensor,
    tau: tuple[Tensor, int],
    g_slots: Tensor,
    g_other: Tensor | None,
    g_entropy: Tensor | None,
) -> Coefficients:
    """Implement merge.coefficients; `merge` above must have returned `merged`."""
    tokens, n = g_slots.shape
    at_slots, a = torch.empty_like(g_slots), torch.empty_like(merged.other_max)
    b = None if g_entropy is None else torch.empty_like(a)
    unused = merged.other_max
    if tokens:
        with torch.cuda.device_of(g_slots):
            _coefficients_kernel[(tokens,)](
                g_slots,
                unused if g_other is None else g_other.contiguous(),
                unused if g_entropy is None else g_entropy.contiguous(),
                ids,
                *tau,
                merged.logprob,
                merged.other_logprob,
                unused if merged.entropy is None else merged.entropy,
                merged.nonfinite.view(torch.int8),
                merged.slot_mass,
                merged.other_sum,
                at_slots,
                a,
                unused if b is None else b,
                n=n,
                padded=triton.next_power_of_2(n),
                with_other=g_other is not None,
                with_entropy=g_entropy is not None,
                num_warps=1 if n <= 32 else 4,
            )
    return Coefficients(at_slots, a, b, merged.other_max, merged.nonfinite)
