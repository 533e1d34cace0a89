"""Merges partial sums over vocabulary blocks to statistics, and turns their gradients into coefficients.

The arithmetic on [T] and [T, n] is replicated, without a vocabulary dimension or a process group. Scores stay relative
to a maximum and are scaled by 1/temperature only after the subtraction, because scaling or adding first would lose the
low bits of large logits. `other` means every valid column that no slot names.

Rows [T, n + 3] summarize a vocabulary block. First comes the logit of each slot with a column in the block, 0 for the
other slots. Then, over the block's other columns z_j: m = max z_j, s = sum e^d_j, u = sum d_j e^d_j with d_j =
(z_j - m)/tau.

Example: one row of logits [1, 3, 2, 0] with tau = 1, the target 1, no top-K list (n = 1), in two blocks of two columns:

    block 0, columns 0 and 1:  slot 3   other column z = 1      m = 1   s = 1              u = 0
    block 1, columns 2 and 3:  slot 0   other columns 2 and 0   m = 2   s = 1 + e^-2       u = -2 e^-2
    merged relative to m = 2:  slot 3   s = e^-1 + 1 + e^-2 = 1.503     u = -e^-1 - 2 e^-2 = -0.639

The largest logit is the slot's, 3. S = 1 + e^(2 - 3) 1.503 = 1.553, so ln pi(target) = -ln S = -0.440, the other mass
is 0.553 / 1.553 = 0.356 and the entropy is ln S - U/S with U = e^-1 (u - s) = -0.788, so 0.948.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .topk import Slots, find_slots

# Replaces -inf where -inf would give NaN: exp(FLOOR) is 0 even in float64, and 0 times FLOOR is 0.
FLOOR = -1.0e4


@dataclass(frozen=True)
class Merged:
    """Contains the statistics: logprob [T, n] by slot; other_logprob, entropy (or None) and nonfinite [T].

    For the backward pass:
        slot_mass   sum of pi over the slots' ids
        other_max   max of the other logits z
        other_sum   sum of e^((z - other_max)/tau) over the other logits z
        slots       the slots that `merge` found; None from other backends
    """

    logprob: Tensor
    other_logprob: Tensor
    entropy: Tensor | None
    nonfinite: Tensor
    slot_mass: Tensor
    other_max: Tensor
    other_sum: Tensor
    slots: Slots | None


def _column(scale: float | Tensor) -> float | Tensor:
    return scale.unsqueeze(1) if isinstance(scale, Tensor) else scale


def empty_rows(rows: Tensor) -> None:
    """Write the summary of a block without columns into rows [T, n + 3]."""
    rows.zero_()
    rows[:, -3] = float("-inf")


def _rescale(m: Tensor, top: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return top (0 for -inf), and the exponent and factor that turn sums relative to m into sums relative to top."""
    top = top.masked_fill(top == float("-inf"), 0.0)
    d = ((m - top) * scale).clamp_min_(FLOOR)
    return top, d, d.exp()


def ordered_sum(parts: Tensor) -> Tensor:
    """Sum over dim 0, one slice after the other. The order of torch.sum varies with the other sizes."""
    first, *addends = parts.unbind()
    for other in addends:
        first = first + other
    return first


def join_sums(sums: Tensor, scale: float | Tensor) -> Tensor:
    """Merge m, s, u of several blocks [blocks, T, 3] into m, s, u of all columns [T, 3]."""
    m, s, u = sums.unbind(dim=2)
    top = m.amax(dim=0)
    _, d, w = _rescale(m, top, scale)
    return torch.stack((top, ordered_sum(w * s), ordered_sum(w * (u + d * s))), dim=1)


def add_rows(rows: Tensor, block: Tensor, scale: float | Tensor) -> None:
    """Merge the summary of another block in the shard into rows, both [T, n + 3], in place."""
    rows[:, :-3] += block[:, :-3]
    rows[:, -3:] = join_sums(torch.stack((rows[:, -3:], block[:, -3:])), scale)


def merge(rows: Tensor, ids: Tensor, scale: float | Tensor, entropy: bool) -> Merged:
    """Merge rows [blocks, T, n + 3] from all ranks, in order, into statistics for the slots ids [T, n].

    scale: 1/tau, a float or [T].
    """
    slots = find_slots(ids)
    scores = ordered_sum(rows[:, :, :-3])
    m, s = rows[:, :, -3], rows[:, :, -2]
    other_max, d, w = _rescale(m, m.amax(dim=0), scale)
    other_sum = ordered_sum(w * s)

    slot_scores = scores.masked_fill(~slots.counted, float("-inf"))
    slot_max, slot_arg = slot_scores.max(dim=1, keepdim=True)
    empty = other_sum == 0
    best_other = other_max.masked_fill(empty, float("-inf")).unsqueeze(1)
    best = torch.maximum(slot_max, best_other)

    d_slots = (scores - best) * _column(scale)
    e_slots = d_slots.exp().masked_fill_(~slots.counted, 0.0)
    d_other = (other_max - best.squeeze(1)) * scale
    w_other = d_other.exp().masked_fill_(empty, 0.0)
    mass_other = w_other * other_sum

    # S = 1 + rest, where 1 is the largest term. So ln pi and 1 - pi stay exact when pi is near 1.
    slot_leads = slot_max >= best_other
    led = e_slots.gather(1, slot_arg).masked_fill_(~slot_leads, 0.0)
    other_slots = e_slots.scatter(1, slot_arg, e_slots.gather(1, slot_arg) - led).sum(dim=1)
    rest = torch.where(slot_leads.squeeze(1), mass_other, mass_other - 1.0) + other_slots
    log_s = rest.log1p()
    total = rest + 1.0
    log_s_column = log_s.unsqueeze(1)

    logprob = (d_slots - log_s_column).masked_fill_(~slots.present, float("-inf"))
    slot_mass = (other_slots + led.squeeze(1)) / total
    direct = d_other + other_sum.log() - log_s
    other_logprob = torch.where(slot_mass < 0.5, torch.log1p(-slot_mass), direct)

    h = None
    if entropy:
        u_other = ordered_sum(w * (rows[:, :, -1] + d * s))
        total_u = w_other * (u_other + d_other.clamp_min(FLOOR) * other_sum)
        total_u = total_u + (d_slots.clamp_min(FLOOR) * e_slots).sum(dim=1)
        h = log_s - total_u / total

    finite = torch.isfinite(scores).logical_or_(~slots.present).all(dim=1)
    finite &= torch.isfinite(log_s) & torch.isfinite(best.squeeze(1))
    return Merged(logprob, other_logprob, h, ~finite, slot_mass, other_max, other_sum, slots)


@dataclass(frozen=True)
class Coefficients:
    """Describes dL/dz: slots [T, n] at the slots' columns, and e^d (a + b d) elsewhere, d = (z - other_max)/tau.

    b is None if the entropy gets no gradient. dead: [T] bool, rows with gradient 0; None if there are none.
    """

    slots: Tensor
    a: Tensor
    b: Tensor | None
    other_max: Tensor
    dead: Tensor | None


def coefficients(
    merged: Merged,
    _ids: Tensor,
    scale: float | Tensor,
    g_slots: Tensor,
    g_other: Tensor | None,
    g_entropy: Tensor | None,
) -> Coefficients:
    """Turn dL/d logprob [T, n], dL/d other_logprob [T] and dL/d entropy [T] into coefficients for the backward pass.

    dz_j = [g_j - pi_j (sum g + h (ln pi_j + H))] / tau for j in a slot; for other j, g_j is g_other pi_j/pi_other.
    Factors 1 - pi are computed by summing the other probabilities, never by subtracting from 1 in working precision.
    """
    skip, slots = merged.nonfinite, merged.slots
    g = g_slots.masked_fill(~slots.present | skip.unsqueeze(1), 0.0)
    g_sum = g.sum(dim=1)
    g = slots.sum_over_twins(g)
    if g_other is not None:
        g_other = g_other.masked_fill(skip | (merged.other_sum == 0), 0.0)
    all_g = g_sum if g_other is None else g_sum + g_other

    lp = merged.logprob
    pi = lp.exp()
    at_slots = -g * torch.expm1(lp) - pi * (all_g.unsqueeze(1) - g)
    pi_other = merged.other_logprob.exp()
    a = -pi_other * g_sum
    if g_other is not None:
        a = a + g_other * merged.slot_mass
    b = None
    if g_entropy is not None:
        h = g_entropy.masked_fill(skip, 0.0)
        entropy = merged.entropy
        at_slots = at_slots - h.unsqueeze(1) * pi * (lp.clamp_min(FLOOR) + entropy.unsqueeze(1))
        b = -h * pi_other
        a = a + b * (merged.other_logprob.clamp_min(FLOOR) + entropy)
    # The elementwise pass is relative to other_max, not to ln pi_other, so the difference is added here.
    safe_sum = merged.other_sum.masked_fill(merged.other_sum == 0, 1.0)
    dead = skip | (merged.other_sum == 0)
    if b is not None:
        a = a - b * safe_sum.log()
        b = (b / safe_sum * scale).masked_fill_(dead, 0.0)
    a = (a / safe_sum * scale).masked_fill_(dead, 0.0)
    at_slots = (at_slots * _column(scale)).masked_fill_(~slots.present | skip.unsqueeze(1), 0.0)
    return Coefficients(at_slots, a, b, merged.other_max, skip)
