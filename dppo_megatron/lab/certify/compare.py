"""Compares two traces of a sequence, operator by operator, and two sets of log-probs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dppo_megatron.errors import ExpectedError
from dppo_megatron.rollout.engines.trace import OUTSIDE, Trace

if TYPE_CHECKING:
    from jaxtyping import Float, Int

FIRST = ("embedding",)
OF_A_LAYER = (
    "residual", "input_norm", "q_projection", "k_projection", "v_projection", "q_norm", "k_norm", "q_rotated",
    "k_rotated", "attention", "attention_projection", "attention_residual", "mlp_norm", "router_logits", "mlp_gate",
    "mlp_up", "mlp_activation", "mlp",
)  # fmt: skip
LAST = ("final_residual", "final_norm", "logits")
"""Operators in computation order."""

ROUNDINGS = {4: 32.0, 2: 1.0}
"""Dtype bytes -> largest difference, in roundings, that another computation order explains. Sums are in fp32, so the
order changes fp32 values by many machine epsilons. In 16 bits, it changes only the last rounding."""
SHARES = (1e-6, 1e-4, 1e-2)
NOT_A_NUMBER = 1 << 31  # ULPs between a number and NaN


@dataclass(frozen=True, slots=True)
class Difference:
    """Compares an operator of a layer between engine and trainer."""

    layer: int  # OUTSIDE = before or after the layers
    operator: str
    elements: int
    differing: int  # elements with different bits; +0 equals -0
    max_ulp: int  # distance in the coarser dtype of both sides
    largest: float  # absolute difference
    roundings: float  # rms difference / rms of the trainer's values, in machine epsilons of the coarser dtype
    bytes: int  # element size in the coarser dtype
    problem: str = ""  # why it could not be compared

    @property
    def name(self) -> str:
        return self.operator if self.layer == OUTSIDE else f"layer {self.layer} {self.operator}"

    @property
    def differs(self) -> bool:
        return self.differing > 0 or bool(self.problem)

    @property
    def beyond_rounding(self) -> bool:
        return not self.roundings <= ROUNDINGS[self.bytes] or bool(self.problem)


def compare(engine: Trace, trainer: Trace) -> list[Difference]:
    """Compare every value that both sides recorded, in computation order.

    The list is empty if the trainer recorded no value. Raises `ExpectedError` if no compared value is inside a layer.
    """
    keys = sorted(engine.keys() & trainer.keys(), key=_place)
    if trainer and all(layer == OUTSIDE for layer, _ in keys):
        raise ExpectedError(
            f"no layer has a value that both sides recorded (engine {len(engine)} values, trainer {len(trainer)}); "
            "docs/certify.md#recorded-values lists the models that can be compared"
        )
    return [_difference(key, engine[key], trainer[key]) for key in keys]


def ulp_distance(a: Float[Tensor, ...], b: Float[Tensor, ...]) -> Int[Tensor, ...]:
    """Return the ULPs between `a` and `b` in fp32 or 16 bits. 0 if both are NaN, NOT_A_NUMBER if only one is NaN."""
    distance = (_ordered(a) - _ordered(b)).abs()
    none = a.isnan().long() + b.isnan().long()
    return torch.where(none == 2, 0, torch.where(none == 1, NOT_A_NUMBER, distance))


def logprob_table(engine: Float[np.ndarray, " n"], trainer: Float[np.ndarray, " n"]) -> dict[str, float]:
    """Compare the log-probs of n sampled tokens. `kl` is KL(engine, trainer) in nats, estimated by k3.

    k3 (Schulman, Approximating KL divergence, 2020) is the mean of r - 1 - ln r over engine samples, with
    r = p_trainer / p_engine.
    """
    log_ratio = trainer.astype(np.float64) - engine.astype(np.float64)
    difference = np.abs(log_ratio)
    ulps = ulp_distance(torch.from_numpy(engine.copy()), torch.from_numpy(trainer.copy())).numpy()
    return {
        "tokens": len(engine),
        "same_bits": float((ulps == 0).mean()),
        "max_ulp": int(ulps.max()),
        "kl": float((np.expm1(log_ratio) - log_ratio).mean()),
        "mean": float(difference.mean()),
        "largest": float(difference.max()),
        **{f"above_{share:g}": float((difference > share).mean()) for share in SHARES},
    }


def _ordered(values: Tensor) -> Tensor:
    """Map floating-point numbers in rising order to consecutive int64. Both zeros become 0."""
    size = values.dtype.itemsize
    bits = values.contiguous().view(torch.int32 if size == 4 else torch.int16).long()
    return torch.where(bits < 0, -(bits & ((1 << (8 * size - 1)) - 1)), bits)


def _place(key: tuple[int, str]) -> tuple[float, int]:
    layer, operator = key
    if operator in FIRST:
        return -1, FIRST.index(operator)
    if operator in LAST:
        return math.inf, LAST.index(operator)
    return layer, OF_A_LAYER.index(operator)


def _difference(key: tuple[int, str], engine: Tensor, trainer: Tensor) -> Difference:
    coarser = max(engine.dtype, trainer.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    if engine.shape != trainer.shape:
        shapes = f"the engine's has the shape {list(engine.shape)}, the trainer's {list(trainer.shape)}"
        return Difference(*key, engine.numel(), engine.numel(), 0, math.inf, math.inf, coarser.itemsize, shapes)
    a, b = engine.to(coarser), trainer.to(coarser)
    ulps = ulp_distance(a, b)
    off = (a.double() - b.double()).abs()
    off = torch.where(ulps == 0, 0.0, off)  # equal infinities have the difference NaN
    scale = float(b.double().square().mean().sqrt()) * torch.finfo(coarser).eps
    error = float(off.square().mean().sqrt())
    roundings = error / scale if scale else math.inf if error else 0.0
    return Difference(
        *key,
        elements=ulps.numel(),
        differing=int((ulps > 0).sum()),
        max_ulp=int(ulps.max()),
        largest=_number(float(off.max())),
        roundings=_number(roundings),
        bytes=coarser.itemsize,
    )


def _number(value: float) -> float:
    return math.inf if math.isnan(value) else value
