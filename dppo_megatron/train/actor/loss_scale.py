"""Implements the dynamic loss scale of fp16: multiplies the loss before the backward pass, divides gradients in fp32.

Megatron's schedule multiplies the loss once, before the backward pass (`TransformerConfig.grad_scale_func`). Megatron's
optimizer divides the fp32 copies before anything reads them, and looks for infinities on all ranks.
"""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from torch import Tensor

from dppo_megatron.config.model import LARGEST, LossScaleConfig


class LossScale(DynamicGradScaler):
    """Shares Megatron's scaler among all optimizer parts, which store it in checkpoints.

    Megatron gives dense and expert parameters a scaler each. Only the first scales the loss, and an overflow updates
    only the scaler of the affected part. After an overflow in experts only, the expert scaler would divide by another
    number than the loss was multiplied by. Here all parts check first. Then `follow` changes the scale in the same way
    on all ranks.
    """

    _scale: Tensor

    def __init__(self, settings: LossScaleConfig):
        super().__init__(
            initial_scale=settings.initial,
            min_scale=settings.smallest,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=settings.growth_interval,
            hysteresis=1,  # every overflow halves the scale, because a lost update costs rollouts
        )

    def serve(self, optimizer: MegatronOptimizer) -> None:
        """Make all parts of `optimizer` use this scaler."""
        for part in optimizer.chained_optimizers:
            part.grad_scaler = self

    def scaled(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the scale, on the device, without a synchronization."""
        return loss * self.scale

    @property
    def value(self) -> float:
        """Return the scale. Synchronizes with the device."""
        return float(self.scale)

    @property
    def can_fall(self) -> bool:
        return self.value > float(self.min_scale)

    def update(self, found_inf: bool) -> None:
        """Do nothing, because Megatron calls this for a part before the next part has divided."""

    def follow(self, *, overflow: bool) -> None:
        """Halve the scale after an overflow; otherwise count the update towards the next growth."""
        super().update(overflow)
        self._scale = self._scale.clamp(max=LARGEST)  # the scale would grow without limit if gradients are 0
