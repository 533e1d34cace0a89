"""Defines the result of `token_statistics` and `linear_token_statistics`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenStatistics:
    """Contains the policy's statistics at T tokens, replicated and bit-identical on every rank in the group.

    All are fp32 (float64 for float64 logits), in nats, at the requested temperature.

    logprob: [T] ln pi(target). Differentiable.
    entropy: [T] over the whole vocabulary, None with entropy="none". Differentiable only with
        entropy="differentiable".
    topk_logprob: [T, K] ln pi of each top-K id, -inf where the id is -1. None without topk_ids.
        Differentiable; the gradient that arrives at an absent id is ignored.
    other_logprob: [T] ln of the mass outside the top-K ids and the target, -inf when nothing is outside.
        None without topk_ids. Differentiable.
    nonfinite: [T] bool, rows with a NaN or +inf logit, or -inf at the target or at a top-K id. Do not use the
        values in these rows. The logits there receive gradient 0, so they cannot affect other rows. A -inf
        elsewhere is probability 0 and not reported.
    """

    logprob: Tensor
    entropy: Tensor | None
    topk_logprob: Tensor | None
    other_logprob: Tensor | None
    nonfinite: Tensor

    def nonfinite_rows(self) -> list[int]:
        """Return the row indices that `nonfinite` reports. Synchronizes with the device."""
        return torch.nonzero(self.nonfinite).flatten().tolist()

    def raise_if_nonfinite(self) -> None:
        """Raise FloatingPointError with the rows that `nonfinite` reports, if any. Synchronizes with the device."""
        rows = self.nonfinite_rows()
        if rows:
            shown = ", ".join(map(str, rows[:20])) + (", ..." if len(rows) > 20 else "")
            raise FloatingPointError(f"non-finite logits in {len(rows)} of {self.nonfinite.numel()} rows: {shown}")
