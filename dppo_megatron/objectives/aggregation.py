"""Reduce per-token losses to one number, with weights that are fixed before the global batch's first micro-batch.

The loss is sum_t weight_t loss_t over all tokens on all ranks (data-parallel gradients are summed, not averaged), so no
split into micro-batches, packs or ranks can change it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .settings import AGGREGATION_KINDS, ObjectiveError, nearest

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def sequence_weights(kind: str, response_lengths: Int[Tensor, " B"], horizon: int | None = None) -> Float[Tensor, " B"]:
    """Return the fp32 weight of a loss-carrying token, for each sequence in the whole global batch.

    token_mean               1 / tokens: every token counts equally.
    seq_mean_token_mean      1 / (sequences length): every sequence counts equally.
    seq_mean_token_sum_norm  1 / (sequences horizon): token sums over a fixed horizon (DPPO; Dr. GRPO).
    seq_mean_token_sum       1 / sequences.
    response_lengths: number of loss-carrying tokens in each sequence. Sequences without such tokens get 0 and do not
    count.
    Raises ObjectiveError for an unknown kind, or seq_mean_token_sum_norm without a positive horizon.

    Example: the lengths [2, 0, 4] give [1/6, 0, 1/6] with token_mean and [1/4, 0, 1/8] with seq_mean_token_mean.
    """
    if kind not in AGGREGATION_KINDS:
        raise ObjectiveError(f"unknown aggregation {kind!r}: {nearest(kind, AGGREGATION_KINDS)}")
    if kind == "seq_mean_token_sum_norm" and (horizon is None or horizon < 1):
        raise ObjectiveError(f"aggregation seq_mean_token_sum_norm needs a horizon of at least 1, got {horizon}")
    lengths = response_lengths.double()
    if kind == "token_mean":
        weights = torch.full_like(lengths, 1 / max(int(response_lengths.sum()), 1))
    else:
        weights = torch.full_like(lengths, 1 / max(int((response_lengths > 0).sum()), 1))
        if kind == "seq_mean_token_mean":
            weights = weights / lengths.clamp(min=1)
        elif kind == "seq_mean_token_sum_norm":
            weights = weights / horizon
    return torch.where(response_lengths > 0, weights, 0.0).float()
