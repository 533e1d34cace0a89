"""Moves the weights to points on the line between their values before and after a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .offload import host_pieces

if TYPE_CHECKING:
    from .actor import Actor


class StepLine:
    """Sets the policy to points between the start and the end of a step.

    Call `mark_start` before the first update of a step. After the last update `go_to` sets the policy to any point on
    the line. The line stores two fp32 copies of this rank's main parameters on the host (pinned, with CUDA); the first
    `go_to` allocates the second copy.
    """

    def __init__(self, actor: Actor):
        self._actor = actor
        self._start: list[Tensor] = []
        self._end: list[Tensor] = []
        self._end_is_known = False

    def mark_start(self) -> None:
        """Copy the weights at the start of a step. No collectives."""
        self._start = self._copy(self._start)
        self._end_is_known = False

    @torch.no_grad()
    def go_to(self, fraction: float) -> None:
        """Set the weights to start + fraction (end - start), computed in fp32 and rounded once to the model's dtype.

        With fraction 0 the weights are bit-identical to the start. All ranks must call this method; with a distributed
        optimizer it runs an all-gather of the parameters.
        """
        actor = self._actor
        if not self._end_is_known:
            self._end, self._end_is_known = self._copy(self._end), True
        with actor.optimizer_on_device():
            for piece, start, end in zip(self._pieces(), self._start, self._end, strict=True):
                piece.copy_(torch.lerp(start, end, fraction) if fraction else start)
            for part in actor.optimizer.chained_optimizers:
                if hasattr(part, "_copy_main_params_to_model_params") and not part.is_stub_optimizer:
                    part._copy_main_params_to_model_params()
        if actor.config.parallel.distributed_optimizer:
            for chunk in actor.model:
                chunk.start_param_sync(force_sync=True)

    @torch.no_grad()
    def reset_moments(self) -> None:
        """Reset Adam to its state before the first update: moments and step 0. No collectives."""
        with self._actor.optimizer_on_device():
            for part in self._parts():
                for state in part.optimizer.state.values():
                    for name in ("exp_avg", "exp_avg_sq", "step"):
                        if isinstance(state.get(name), Tensor):
                            state[name].zero_()
                for group in part.optimizer.param_groups:
                    if "step" in group:  # TransformerEngine's and apex's Adam count by group
                        group["step"] = group["step"] * 0

    @torch.no_grad()
    def _copy(self, copies: list[Tensor]) -> list[Tensor]:
        """Copy the pieces into `copies`, allocated only once because pinned memory is slow to allocate."""
        with self._actor.optimizer_on_device():
            pieces = list(self._pieces())
            pinned = self._actor.layout.device.type == "cuda"
            copies = copies or [torch.empty_like(p, device="cpu", pin_memory=pinned) for p in pieces]
            for copy, piece in zip(copies, pieces, strict=True):
                copy.copy_(piece)
        return copies

    def _pieces(self) -> Iterator[Tensor]:
        """Yield the fp32 parameters in this rank's part of the optimizer, flat and in pieces.

        A copy of a whole parameter would take up to twice the parameter size, see `host_pieces`.
        """
        for part in self._parts():
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    sizes = [size // parameter.element_size() for size in host_pieces(parameter.nbytes)]
                    yield from parameter.detach().view(-1).split(sizes)

    def _parts(self) -> list:
        return [part for part in self._actor.optimizer.chained_optimizers if part.optimizer is not None]
