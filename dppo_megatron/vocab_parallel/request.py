"""One call's arguments after validation, and what all implementations share around the two passes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from . import torch_backend
from .deferred import DeferredChecks, Verification
from .merge import Coefficients, Merged
from .sampling_masks import SamplingMasks
from .shard import HEADER, Shard, gather_rows, write_header
from .statistics import TokenStatistics
from .topk import join_ids


@dataclass(frozen=True)
class Request:
    """target_ids: [T]. topk_ids: [T, K] or None. masks: None where no row is restricted. scale: 1/tau. dtype: of the
    arithmetic and the results."""

    target_ids: Tensor
    topk_ids: Tensor | None
    masks: SamplingMasks | None
    shard: Shard
    scale: float | Tensor
    entropy: str
    dtype: torch.dtype
    check: bool | DeferredChecks
    backend: ModuleType

    def _verify(self, headers: Tensor | None) -> None:
        if self.check is False:
            return
        checks = DeferredChecks() if self.check is True else self.check
        checks.add(Verification.of(self.target_ids, self.topk_ids, self.scale, self.shard, self.masks, headers))
        if self.check is True:
            checks.raise_if_failed()

    def forward(self, fill: Callable[[Tensor, Tensor], None]) -> tuple[Tensor, Merged]:
        """Merge the shards of all ranks, tile by tile in order. One all-gather if there is more than one rank.

        fill(ids, out) writes this rank's rows of merge.py into out [tiles, T, n + 3]. Returns ids [T, n] and the
        result.
        """
        ids = join_ids(self.target_ids, self.topk_ids)
        tokens, n = ids.shape
        tiles = self.shard.tiles
        device = ids.device
        if self.shard.world == 1:
            self._verify(None)
            rows = torch.empty((tiles, tokens, n + 3), dtype=self.dtype, device=device)
            fill(ids, rows)
        else:
            packed = torch.zeros((tiles * tokens + 1, n + 3), dtype=self.dtype, device=device)
            if self.check is not False:
                masks = () if self.masks is None else (self.masks.ids, self.masks.rows)
                write_header(packed[0], self.shard, ids, *masks)
            fill(ids, packed[1:].view(tiles, tokens, n + 3))
            gathered = gather_rows(packed, self.shard)
            self._verify(gathered[:, 0, :HEADER])
            rows = gathered[:, 1:].reshape(self.shard.world * tiles, tokens, n + 3)
        return ids, self.backend.merge(rows, ids, self.scale, entropy=self.entropy != "none")

    def outputs(self, merged: Merged) -> tuple[Tensor | None, ...]:
        """Fresh tensors: logprob, topk_logprob, other_logprob, entropy, nonfinite."""
        topk = None if self.topk_ids is None else merged.logprob[:, 1:].clone()
        other = None if self.topk_ids is None else merged.other_logprob.clone()
        entropy = None if merged.entropy is None else merged.entropy.clone()
        return merged.logprob[:, 0].clone(), topk, other, entropy, merged.nonfinite.clone()

    def coefficients(
        self, ids: Tensor, merged: Merged, grads: tuple[Tensor | None, ...]
    ) -> tuple[Coefficients, Tensor | None] | None:
        """Gradients of `outputs` -> what the backward pass writes, and its dead rows; None if none came."""
        g_logprob, g_topk, g_other, g_entropy, _ = grads
        if self.entropy != "differentiable":
            g_entropy = None
        if g_logprob is None and g_topk is None and g_other is None and g_entropy is None:
            return None
        g_slots = torch.zeros_like(merged.logprob)
        if g_logprob is not None:
            g_slots[:, 0] = g_logprob
        if g_topk is not None:
            g_slots[:, 1:] = g_topk
        dead: Tensor | None = merged.nonfinite
        if dead.device.type == "cpu" and not bool(dead.any()):  # elsewhere the question would cost a sync
            dead = None
        return self.backend.coefficients(merged, ids, self.scale, g_slots, g_other, g_entropy), dead


def statistics(outputs: tuple[Tensor | None, ...]) -> TokenStatistics:
    logprob, topk, other, entropy, nonfinite = outputs
    return TokenStatistics(logprob, entropy, topk, other, nonfinite)


def choose_backend(backend: str, device: torch.device) -> ModuleType:
    """The module for `backend`; "auto" is Triton for CUDA tensors where it is installed, else torch.

    Triton is imported here, on first use. Raises ValueError where "triton" cannot work.
    """
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return torch_backend
    try:
        from . import triton_backend
    except ImportError as error:
        if backend == "auto":
            return torch_backend
        raise ValueError(f'backend="triton" needs the triton package ({error}); "torch" works without') from error
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f'backend="triton" needs CUDA tensors or TRITON_INTERPRET=1, got tensors on {device}')
    return triton_backend
