"""Plans the FlashAttention calls for a micro-batch; `local.flash` computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from .context import gathered_places

if TYPE_CHECKING:
    from jaxtyping import Int

# Arguments of both operators: int32 query bounds and key bounds, most queries and keys in a segment, dropout, causal.
Call = tuple[Tensor, Tensor, int, int, float, bool]


@dataclass(frozen=True)
class FlashPlan:
    """Plans the calls for a micro-batch once for all layers.

    Example: a prompt of 3 rows, then two samples of 2 rows and 1 row. `segments` has the bounds [0, 3, 5, 6], `rows` is
    [3, 4, 5], `keys` is [0, 1, 2], and `prefixes` has a single segment of 3 queries and 3 keys.
    """

    segments: Call
    prefixes: Call | None = None  # if None, `rows` and `keys` are None too: no segment continues another
    rows: Int[Tensor, " n"] | None = None  # queries of `prefixes`
    keys: Int[Tensor, " m"] | None = None  # keys of `prefixes`: rows here, or of all context-parallel ranks end to end


def can_use_flash(dtype: torch.dtype, head_size: int, device: torch.device) -> bool:
    """Return whether FlashAttention works forward and backward: 16 bits, sizes up to 256, multiples of 8."""
    x = torch.empty(1, 1, 8, head_size, dtype=dtype, device=device, requires_grad=True)
    return can_use_flash_attention(SDPAParams(x, x, x, None, 0.0, True, False))


def plan_flash(
    bounds: Tensor, prefixes: Tensor | None, context_rank: int, context_size: int, device: torch.device
) -> FlashPlan:
    """Plan the calls for the segments between `bounds`; `segments.plan_segments` describes the arguments."""
    bounds = bounds.long()
    lengths = bounds.diff()
    if context_size > 1:  # this rank's two chunks of each sequence, see `batch.context`
        chunks, size = torch.tensor([context_rank, 2 * context_size - 1 - context_rank]), lengths // (2 * context_size)
        prefixes = torch.stack((bounds[:-1].repeat_interleave(2), (size[:, None] * chunks).flatten()), dim=1)
        lengths = size.repeat_interleave(2)
    own_call = _call(lengths, lengths, True, device)
    if prefixes is None or not bool(prefixes[:, 1].any()):
        return FlashPlan(own_call)
    continues = prefixes[:, 1] > 0
    continued, group = prefixes[continues].unique_consecutive(dim=0, return_inverse=True)  # samples of one prompt
    first, counts = continued.long().unbind(dim=1)
    queries = torch.zeros_like(counts).index_add_(0, group, lengths[continues])
    rows = continues.repeat_interleave(lengths).nonzero().flatten()
    keys = torch.arange(int(counts.sum())) + (first - counts.cumsum(0) + counts).repeat_interleave(counts)
    keys = keys if context_size == 1 else gathered_places(bounds, context_size)[keys]
    return FlashPlan(own_call, _call(queries, counts, False, device), rows.to(device), keys.to(device))


def _call(queries: Int[Tensor, " S"], keys: Int[Tensor, " S"], causal: bool, device: torch.device) -> Call:
    query_bounds, key_bounds = (F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32) for lengths in (queries, keys))
    return query_bounds, key_bounds, int(queries.max()), int(keys.max()), 0.0, causal
