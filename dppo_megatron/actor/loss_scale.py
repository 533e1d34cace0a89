"""The dynamic loss scale of fp16: gradients are computed of a multiple of the loss, and divided again in fp32.

Megatron's schedule multiplies the loss, once, where the backward pass begins (`TransformerConfig.grad_scale_func`); its
optimizer divides what it has copied to fp32, before anything reads it, and looks for infinities on all ranks.
"""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from torch import Tensor

from dppo_megatron.config.loss_scale import LARGEST, LossScaleConfig


class LossScale(DynamicGradScaler):
    """Megatron's scaler, one for all parts of an optimizer, which keep it in checkpoints.

    Megatron gives dense and expert parameters one each, of which only the first scales the loss. And it lets each
    follow what its own part found: after an overflow of the experts alone, theirs would divide by another number than
    the loss was multiplied by. Here all parts look first, and `follow` moves the scale, as the caller has decided for
    all ranks.
    """

    def __init__(self, settings: LossScaleConfig):
        super().__init__(
            initial_scale=settings.initial,
            min_scale=settings.smallest,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=settings.growth_interval,
            hysteresis=1,  # every overflow halves: an update that is lost costs rollouts
        )

    def serve(self, optimizer: MegatronOptimizer) -> None:
        for part in optimizer.chained_optimizers:
            part.grad_scaler = self

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale, on the device and without a wait."""
        return loss * self.scale

    @property
    def value(self) -> float:
        """The host waits for the device."""
        return float(self.scale)

    @property
    def can_fall(self) -> bool:
        return self.value > float(self.min_scale)

    def update(self, found_inf: bool) -> None:
        """Nothing: Megatron calls it for one part when the next has yet to divide."""

    def follow(self, *, overflow: bool) -> None:
        """After an update: halves the scale, or counts towards its growth."""
        super().update(overflow)
        self._scale = self._scale.clamp(max=LARGEST)  # without gradients nothing else would ever stop it
