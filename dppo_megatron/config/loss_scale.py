"""The section `optimizer.loss_scale`: what the loss is multiplied by where gradients are computed in fp16."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, Field

from .section import Count, Float, Section, refusal

LARGEST = 2.0**32


def _power_of_two(value: float) -> float:
    if math.frexp(value)[0] != 0.5:
        raise refusal("must be a power of two, so that scaling changes no bit of a gradient")
    return value


Scale = Annotated[Float, Field(ge=2.0**-24, le=LARGEST), AfterValidator(_power_of_two)]


class LossScaleConfig(Section):
    """Of `model.dtype: fp16` alone, whose numbers end at 65504 and at 6e-8."""

    initial: Scale = Field(2.0**16, description="of the first update; a power of two")
    growth_interval: Count = Field(
        400, description="updates in a row without an overflow after which the scale is doubled"
    )
    smallest: Scale = Field(1.0, description="an overflow halves the scale, down to this one; a power of two")
