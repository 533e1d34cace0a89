"""From per-token losses to one number: weights of the whole global batch, fixed before its first micro-batch.

The loss is sum_t weight_t loss_t over all tokens of all ranks (data-parallel gradients are summed, not
averaged), so no split into micro-batches, packs or ranks can change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .settings import AGGREGATION_KINDS, ObjectiveError, nearest

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class BatchCounts:
    """Denominators of one global batch: loss-carrying tokens, and sequences that have at least one."""

    tokens: int
    sequences: int

    @classmethod
    def of(cls, response_lengths: Int[Tensor, " B"]) -> BatchCounts:
        """Counts of some sequences, from the loss-carrying tokens of each. Reads the tensor on the host."""
        return cls(int(response_lengths.sum()), int((response_lengths > 0).sum()))

    def __add__(self, other: BatchCounts) -> BatchCounts:
        return BatchCounts(self.tokens + other.tokens, self.sequences + other.sequences)

    def to_tensor(self, device: torch.device | str | None = None) -> Int[Tensor, " 2"]:
        """[tokens, sequences] int64, to be summed over data-parallel ranks."""
        return torch.tensor([self.tokens, self.sequences], dtype=torch.int64, device=device)

    @classmethod
    def from_tensor(cls, counts: Int[Tensor, " 2"]) -> BatchCounts:
        return cls(*(int(n) for n in counts.tolist()))


def sequence_weights(
    kind: str,
    response_lengths: Int[Tensor, " B"],
    horizon: int | None = None,
    total: BatchCounts | None = None,
) -> Float[Tensor, " B"]:
    """Weight of every loss-carrying token of each sequence, fp32.

    token_mean               1 / tokens: every token of the batch counts the same.
    seq_mean_token_mean      1 / (sequences length): every sequence counts the same.
    seq_mean_token_sum_norm  1 / (sequences horizon): token sums over a fixed horizon (DPPO; Dr. GRPO).
    seq_mean_token_sum       1 / sequences.
    response_lengths: loss-carrying tokens of each sequence; a sequence without any gets 0 and counts nowhere.
    total: counts of the whole global batch; None when these sequences are all of it.
    Raises ObjectiveError for an unknown kind, or seq_mean_token_sum_norm without a positive horizon.
    """
    if kind not in AGGREGATION_KINDS:
        raise ObjectiveError(f"unknown aggregation {kind!r}: {nearest(kind, AGGREGATION_KINDS)}")
    if kind == "seq_mean_token_sum_norm" and (horizon is None or horizon < 1):
        raise ObjectiveError(f"aggregation seq_mean_token_sum_norm needs a horizon of at least 1, got {horizon}")
    total = total or BatchCounts.of(response_lengths)
    lengths = response_lengths.double()
    if kind == "token_mean":
        weights = torch.full_like(lengths, 1 / max(total.tokens, 1))
    else:
        weights = torch.full_like(lengths, 1 / max(total.sequences, 1))
        if kind == "seq_mean_token_mean":
            weights = weights / lengths.clamp(min=1)
        elif kind == "seq_mean_token_sum_norm":
            weights = weights / horizon
    return torch.where(response_lengths > 0, weights, 0.0).float()
