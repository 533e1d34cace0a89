"""Checks arguments; errors name the argument and the sizes.

Values on the device can be checked later, because to read a value the host waits for all earlier work.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .sampling_mask import SamplingMasks

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGER = (torch.int64, torch.int32)


class DeferredChecks:
    """Collects the checks of many calls that pass `check=` this object, and reads the device once for all calls.

    Until `raise_if_failed` returns, a call's results may be invalid. The ids of pending calls stay in memory.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[list[float]], None], Tensor]] = []

    def add(self, raise_if_wrong: Callable[[list[float]], None], numbers: Tensor) -> None:
        """Add a call's check; `raise_if_wrong` gets the fp64 `numbers` once they are on the host."""
        self._waiting.append((raise_if_wrong, numbers))

    def raise_if_failed(self) -> None:
        """Raise the first failing call's error, and forget all calls. Synchronizes at most once."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        call_numbers = (
            torch.cat([numbers for _, numbers in waiting]).cpu().split([len(numbers) for _, numbers in waiting])
        )
        for (raise_if_wrong, _), numbers in zip(waiting, call_numbers, strict=True):
            raise_if_wrong(numbers.tolist())


def shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def check_floating(name: str, tensor: Tensor, dim: int, dims: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor {dims}, got {type(tensor).__name__}")
    if tensor.dim() != dim:
        raise ValueError(f"{name} must be {dims}, got shape {shape(tensor)}")
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be bf16, fp16, fp32 or float64, got {tensor.dtype}")


def check_ids(name: str, ids: Tensor, dim: int, dims: str, tokens: int, device: torch.device) -> None:
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name} must be a tensor {dims}, got {type(ids).__name__}")
    if ids.dtype not in _INTEGER:
        raise TypeError(f"{name} must be int32 or int64, got {ids.dtype}")
    if ids.dim() != dim or ids.shape[0] != tokens:
        raise ValueError(f"{name} must be {dims} with T = {tokens}, got shape {shape(ids)}")
    if ids.device != device:
        raise ValueError(f"{name} is on {ids.device}, the logits are on {device}")


def check_sampling_masks(
    sampling_mask_ids: Tensor | None, sampling_mask_counts: Tensor | None, tokens: int, device: torch.device
) -> None:
    if sampling_mask_ids is None and sampling_mask_counts is None:
        return
    if sampling_mask_ids is None or sampling_mask_counts is None:
        raise ValueError("sampling_mask_ids and sampling_mask_counts belong together: pass both, or neither")
    check_ids("sampling_mask_counts", sampling_mask_counts, 1, "[T]", tokens, device)
    entries = len(sampling_mask_ids) if sampling_mask_ids.dim() else 0
    check_ids("sampling_mask_ids", sampling_mask_ids, 1, "[N]", entries, device)


def inverse_temperature(
    temperature: float | Tensor, tokens: int, device: torch.device, dtype: torch.dtype
) -> float | Tensor:
    """Return 1/tau as a float, or as a tensor [T] of `dtype` if the temperature is per token."""
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        if temperature.shape != (tokens,):
            raise ValueError(f"temperature must be a float or [T] with T = {tokens}, got {shape(temperature)}")
        if temperature.device != device:
            raise ValueError(f"temperature is on {temperature.device}, the logits are on {device}")
        return temperature.detach().to(dtype).reciprocal()
    value = float(temperature)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"temperature must be positive and finite, got {value}")
    return 1.0 / value


def _named_ids(
    target_ids: Tensor, topk_ids: Tensor | None, masks: SamplingMasks | None
) -> list[tuple[str, int, Tensor]]:
    """Return (name, smallest allowed id, ids) for each argument that has ids."""
    named_ids = [("target_ids", 0, target_ids)]
    named_ids += [] if topk_ids is None else [("topk_ids", -1, topk_ids)]
    named_ids += [] if masks is None else [("sampling_mask_ids", 0, masks.ids)]
    return [entry for entry in named_ids if entry[2].numel()]


def id_extremes(
    target_ids: Tensor, topk_ids: Tensor | None, scale: float | Tensor, masks: SamplingMasks | None = None
) -> Tensor:
    """Return the numbers about ids, scale and masks that `check_id_values` needs, in fp64. No synchronization."""
    extremes: list[Tensor] = []
    for _, _, ids in _named_ids(target_ids, topk_ids, masks):
        extremes += torch.aminmax(ids)
    if isinstance(scale, Tensor):
        extremes.append((torch.isfinite(scale) & (scale > 0)).all())
    if masks is not None:
        extremes += [masks.total - len(masks.ids), masks.missing(target_ids).sum()]
    if not extremes:
        return target_ids.new_zeros(0, dtype=torch.float64)
    return torch.stack([extreme.double() for extreme in extremes])


def check_id_values(
    target_ids: Tensor,
    topk_ids: Tensor | None,
    scale: float | Tensor,
    vocab: int,
    extremes: list[float],
    masks: SamplingMasks | None = None,
) -> None:
    """Raise ValueError for invalid ids, temperatures or sampling masks.

    Ids must be in the vocabulary, temperatures positive and finite, and targets in their row's sampling mask. Mask
    counts must add up to the number of mask ids.
    extremes: `id_extremes` of these arguments, on the host. Only an error reads the arguments themselves, which
    synchronizes with the device.
    """
    values = [int(extreme) for extreme in extremes]
    for name, low, ids in _named_ids(target_ids, topk_ids, masks):
        (lowest, highest), values = values[:2], values[2:]
        if lowest < low or highest >= vocab:
            bad = torch.nonzero((ids < low) | (ids >= vocab))
            raise ValueError(
                f"{name} must be within [{low}, {vocab}), found {lowest} to {highest}; {bad.shape[0]} out of "
                f"range, the first at {bad[0].tolist()}"
            )
    if isinstance(scale, Tensor) and not values.pop(0):
        bad = torch.nonzero(~(torch.isfinite(scale) & (scale > 0))).flatten()
        raise ValueError(f"temperature must be positive and finite; {bad.numel()} are not, first at {int(bad[0])}")
    if masks is not None and values[0]:
        added = f"add up to {len(masks.ids) + values[0]}" if masks.total >= 0 else "are partly negative"
        raise ValueError(f"sampling_mask_counts {added}, expected {len(masks.ids)}, the number of sampling_mask_ids")
    if masks is not None and values[1]:
        bad = torch.nonzero(masks.missing(target_ids)).flatten()
        raise ValueError(
            f"{bad.numel()} target_ids are not in their row's sampling_mask_ids, the first at {int(bad[0])}"
        )
