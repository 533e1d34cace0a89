"""Validates a call's arguments, and runs the steps around both passes, which stored and fused logits share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import checks, torch_backend
from .checks import DeferredChecks
from .merge import Coefficients, Merged
from .sampling_mask import SamplingMasks
from .shard import HEADER, Shard, gather_rows, total_columns, write_header
from .topk import join_ids

ENTROPY = ("none", "metric", "differentiable")
BACKENDS = ("auto", "torch", "triton")


@dataclass(frozen=True)
class Request:
    """Contains a call's arguments for T rows.

    target_ids: [T].
    topk_ids: [T, K] or None.
    masks: None without sampling masks.
    scale: 1/temperature.
    dtype: for arithmetic and results.
    """

    target_ids: Tensor
    topk_ids: Tensor | None
    masks: SamplingMasks | None
    shard: Shard
    scale: float | Tensor
    entropy: str
    dtype: torch.dtype
    check: bool | DeferredChecks
    backend: ModuleType

    @classmethod
    def build(
        cls,
        like: Tensor,
        tokens: int,
        shard: Shard,
        *,
        target_ids: Tensor,
        topk_ids: Tensor | None,
        temperature: float | Tensor,
        entropy: str,
        backend: str,
        sampling_mask_ids: Tensor | None,
        sampling_mask_counts: Tensor | None,
        loss_mask: Tensor | None,
        check: bool | DeferredChecks,
    ) -> Request:
        """Validate the arguments that both functions take. `like` has the logits' device and dtype."""
        for name, option, choices in (("entropy", entropy, ENTROPY), ("backend", backend, BACKENDS)):
            if option not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {option!r}")
        checks.check_ids("target_ids", target_ids, 1, "[T]", tokens, like.device)
        if topk_ids is not None:
            checks.check_ids("topk_ids", topk_ids, 2, "[T, K]", tokens, like.device)
        if loss_mask is not None and (loss_mask.shape != (tokens,) or loss_mask.dtype != torch.bool):
            actual = f"{loss_mask.dtype} {checks.shape(loss_mask)}"
            raise ValueError(f"loss_mask must be bool [T] with T = {tokens}, got {actual}")
        checks.check_sampling_masks(sampling_mask_ids, sampling_mask_counts, tokens, like.device)
        dtype = torch_backend.accumulation_dtype(like.dtype)
        return cls(
            target_ids,
            topk_ids,
            None if sampling_mask_ids is None else SamplingMasks.from_ids(sampling_mask_ids, sampling_mask_counts),
            shard,
            checks.inverse_temperature(temperature, tokens, like.device, dtype),
            entropy,
            dtype,
            check,
            choose_backend(backend, like.device),
        )

    def cleaned(self, loss_mask: Tensor) -> Request:
        """Return the request with harmless values in the rows where loss_mask [T] is False."""
        topk, masks, scale = self.topk_ids, self.masks, self.scale
        return replace(
            self,
            target_ids=torch.where(loss_mask, self.target_ids, 0),
            topk_ids=None if topk is None else torch.where(loss_mask[:, None], topk, -1),
            masks=None if masks is None else replace(masks, restricted=masks.restricted & loss_mask),
            scale=torch.where(loss_mask, scale, 1.0) if isinstance(scale, Tensor) else scale,
        )

    def select(self, rows: Tensor) -> Request:
        """Return the request for only the rows [n], ascending. Synchronizes with the device if there are masks."""
        return replace(
            self,
            target_ids=self.target_ids.index_select(0, rows),
            topk_ids=None if self.topk_ids is None else self.topk_ids.index_select(0, rows),
            masks=None if self.masks is None else self.masks.select(rows),
            scale=self.scale.index_select(0, rows) if isinstance(self.scale, Tensor) else self.scale,
        )

    def _verify(self, headers: Tensor | None) -> None:
        """Check the call now, or later with a DeferredChecks. headers: [world, HEADER], None for a single shard."""
        if self.check is False:
            return
        numbers = checks.id_extremes(self.target_ids, self.topk_ids, self.scale, self.masks)
        if headers is not None:
            numbers = torch.cat((numbers, headers.double().flatten()))
        deferred = DeferredChecks() if self.check is True else self.check
        deferred.add(self._raise_if_wrong, numbers)
        if self.check is True:
            deferred.raise_if_failed()

    def _raise_if_wrong(self, numbers: list[float]) -> None:
        """Raise ValueError if ids or temperatures are wrong, or the group's ranks disagree.

        numbers: `id_extremes`, then the headers from all ranks if there are several.
        """
        headers = None
        if self.shard.world > 1:
            flat = numbers[-self.shard.world * HEADER :]
            numbers = numbers[: -len(flat)]
            headers = [flat[i : i + HEADER] for i in range(0, len(flat), HEADER)]
        total = total_columns(self.shard, headers)
        vocab = total if self.shard.vocab_size is None else self.shard.vocab_size
        checks.check_id_values(self.target_ids, self.topk_ids, self.scale, vocab, numbers, self.masks)

    def forward(self, ctx: Any, fill: Callable[[Tensor, Tensor], None]) -> tuple[Tensor | None, ...]:
        """Merge the shards of all ranks, tile by tile in order, and keep in `ctx` the tensors for the backward pass.

        fill(ids [T, n], out [tiles, T, n + 3]) writes this rank's rows, as merge.py defines them. Returns fresh tensors
        in `TokenStatistics` order. Collectives: one all-gather if there are several ranks.
        """
        ctx.set_materialize_grads(False)
        ids = join_ids(self.target_ids, self.topk_ids)
        tokens, n = ids.shape
        tiles = self.shard.tiles
        if self.shard.world == 1:
            self._verify(None)
            rows = torch.empty((tiles, tokens, n + 3), dtype=self.dtype, device=ids.device)
            fill(ids, rows)
        else:
            packed = torch.zeros((tiles * tokens + 1, n + 3), dtype=self.dtype, device=ids.device)
            if self.check is not False:
                masks = () if self.masks is None else (self.masks.ids, self.masks.rows)
                write_header(packed[0], self.shard, ids, *masks)
            fill(ids, packed[1:].view(tiles, tokens, n + 3))
            gathered = gather_rows(packed, self.shard)
            self._verify(gathered[:, 0, :HEADER])
            rows = gathered[:, 1:].reshape(self.shard.world * tiles, tokens, n + 3)
        merged = self.backend.merge(rows, ids, self.scale, entropy=self.entropy != "none")
        ctx.request, ctx.ids, ctx.merged = self, ids, merged
        topk = None if self.topk_ids is None else merged.logprob[:, 1:].clone()
        other = None if self.topk_ids is None else merged.other_logprob.clone()
        entropy = None if merged.entropy is None else merged.entropy.clone()
        nonfinite = merged.nonfinite.clone()
        metric = entropy is not None and self.entropy == "metric"
        ctx.mark_non_differentiable(nonfinite, *([entropy] if metric else []))
        return merged.logprob[:, 0].clone(), entropy, topk, other, nonfinite

    def coefficients(self, ctx: Any, grads: tuple[Tensor | None, ...]) -> Coefficients:
        """Turn the gradients with respect to `forward`'s outputs into coefficients for the backward pass."""
        g_logprob, g_entropy, g_topk, g_other, _ = grads
        if self.entropy != "differentiable":
            g_entropy = None
        merged: Merged = ctx.merged
        g_slots = torch.zeros_like(merged.logprob)
        if g_logprob is not None:
            g_slots[:, 0] = g_logprob
        if g_topk is not None:
            g_slots[:, 1:] = g_topk
        coefficients = self.backend.coefficients(merged, ctx.ids, self.scale, g_slots, g_other, g_entropy)
        # Only on the CPU: elsewhere this would cost a sync.
        if coefficients.dead.device.type == "cpu" and not bool(coefficients.dead.any()):
            coefficients = replace(coefficients, dead=None)
        return coefficients


def choose_backend(backend: str, device: torch.device) -> ModuleType:
    """Return the module for `backend`; "auto" is Triton for CUDA tensors where it is installed, else torch.

    Triton is imported here, on first use. Raises ValueError if "triton" cannot work.
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
