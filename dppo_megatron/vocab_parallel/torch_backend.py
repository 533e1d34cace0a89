"""Implements the torch backend.

A backend is a module with four functions. `forward` and `backward` pass over a block of the vocabulary: the first fills
the rows that the collective transfers, the second turns logits into their gradient. `merge` and `coefficients` are the
arithmetic on [T, n] between them.
"""

from __future__ import annotations

from torch import Tensor

from . import blocks
from .merge import Coefficients, coefficients, merge
from .topk import local_slots

__all__ = ["backward", "coefficients", "forward", "merge"]


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

    block: [T, columns > 0] logits of columns [first, first + columns). The slots' columns become -inf during the call;
    with `restore` the block has its old bits at the end. `compiled.worthwhile` describes `large`.
    """
    n = ids.shape[1]
    slots = local_slots(ids, first, block.shape[1])
    hidden = slots.hide(block)
    try:
        out[:, :n] = hidden.masked_fill(~slots.inside, 0.0)
        blocks.block_sums(block, scale, out[:, n:], entropy, compiled=large)
    finally:
        if restore:
            slots.show(block, hidden)


def backward(
    block: Tensor,
    ids: Tensor,
    first: int,
    scale: float | Tensor,
    found: Coefficients,
    *,
    large: bool,
) -> None:
    """Overwrite block [T, columns > 0] of logits by their gradient."""
    blocks.block_gradient(block, scale, found, compiled=large)
    local_slots(ids, first, block.shape[1]).put(block, found.slots)
