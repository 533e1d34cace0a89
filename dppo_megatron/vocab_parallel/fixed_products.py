"""Matrix products whose rows have the same bits whatever rows stand beside them, and the head made of them.

A library picks the kernel of a product, and so the order of its sums, by the shape of the operands. Here every product
has one number of rows: as many as there are go through in tiles of it, the last one filled up with zeros. On CPUs one
thread computes a tile: MKL has several share the sum of an element (on Intel processors, where there are
few elements and long sums).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import reduce_gradient

if TYPE_CHECKING:
    from jaxtyping import Float

# A tile's product should fill the device, and the rows that fill up the last one are computed for nothing.
_ROWS_CPU = 128
_ROWS_GPU = 512


def fixed_mm(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [T, A] @ matrix [A, B] + bias [B] -> [T, B], the bits of a row independent of T and of the other rows.

    That holds where a kernel treats the rows of a tile alike: tests/vocab_parallel/test_fixed_products.py asks the CPU.
    """
    on_cpu = rows.device.type == "cpu"
    size = _ROWS_CPU if on_cpu else _ROWS_GPU
    tokens = rows.shape[0]
    rows = rows.contiguous()
    out = rows.new_empty((-(-tokens // size) * size, matrix.shape[1]))
    with _one_thread() if on_cpu else nullcontext():
        for start in range(0, tokens, size):
            tile = rows[start : start + size]
            if len(tile) < size:
                tile = torch.cat((tile, tile.new_zeros(size - len(tile), tile.shape[1])))
            if bias is None:
                torch.mm(tile, matrix, out=out[start : start + size])
            else:
                torch.addmm(bias, tile, matrix, out=out[start : start + size])
    return out[:tokens]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch computes with one thread inside. Takes a microsecond."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            return fixed_mm(hidden, weight.t())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad
        d_hidden = fixed_mm(gradient, weight) if need_hidden else None
        d_weight = torch.mm(gradient.t(), hidden) if need_weight else None
        return d_hidden, d_weight


def batch_invariant_logits(
    hidden: Float[Tensor, "T H"], weight: Float[Tensor, "V_local H"], group: dist.ProcessGroup | None = None
) -> Float[Tensor, "T V_local"]:
    """hidden @ weight.T, each row and its hidden gradient the same bits whatever rows stand beside it.

    hidden [T, H] replicated over `group`, weight [V_local, H] this rank's rows of it, of one dtype. The hidden gradient
    is complete on return. The weight gradient is a sum over the rows, in the order that the library takes.
    Collectives: backward an all-to-all and an all-gather of the hidden gradient; none without a group.
    """
    if group is not None and dist.get_world_size(group) > 1:
        hidden = reduce_gradient(hidden, group, in_order=True)
    return _Head.apply(hidden, weight)
