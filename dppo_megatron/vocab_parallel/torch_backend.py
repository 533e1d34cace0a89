"""The torch backend.

A backend is a module with these four functions. The two passes over a block of the vocabulary: `forward` fills
what the collective carries, `backward` turns logits into their gradient. The arithmetic on [T, n] between them:
`merge` and `coefficients`.
"""

from __future__ import annotations

from torch import Tensor

from . import blocks
from . import merge as arithmetic
from .merge import Coefficients, Merged
from .topk import find_slots, local_slots


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
    """Fill out [T, n + 3] with the logit of each slot in the block (0 elsewhere), then m, s, u.

    block: [T, columns > 0] logits of columns [first, first + columns). It is written during the call (the slots'
    columns become -inf) and with `restore` holds its old bits again at the end. large: see
    compiled.worthwhile.
    """
    n = ids.shape[1]
    slots = local_slots(ids, first, block.shape[1])
    kept = slots.hide(block)
    try:
        out[:, :n] = kept.masked_fill(~slots.inside, 0.0)
        blocks.block_sums(block, scale, out[:, n:], entropy, compiled=large)
    finally:
        if restore:
            slots.show(block, kept)


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
    """Overwrite block [T, columns > 0] of logits by their gradient. dead: [T] bool, rows that get 0."""
    blocks.block_gradient(block, other_max, scale, coefficients.a, coefficients.b, dead, compiled=large)
    local_slots(ids, first, block.shape[1]).put(block, coefficients.slots)


def merge(rows: Tensor, ids: Tensor, scale: float | Tensor, entropy: bool) -> Merged:
    """Summaries of all ranks [blocks, T, n + 3] -> statistics of the slots ids [T, n]."""
    return arithmetic.merge(rows, find_slots(ids), scale, entropy)


def coefficients(
    merged: Merged,
    ids: Tensor,
    scale: float | Tensor,
    g_slots: Tensor,
    g_other: Tensor | None,
    g_entropy: Tensor | None,
) -> Coefficients:
    """Gradients by the slots' log-probs [T, n], other_logprob and entropy [T] -> what `backward` writes."""
    return arithmetic.coefficients(merged, scale, g_slots, g_other, g_entropy)
