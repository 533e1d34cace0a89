"""The section `acceptance`: a bound on how far one step moves the policy, measured after its updates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .section import CountFromZero, Float, Positive, Section


class AcceptanceConfig(Section):
    """Off without a bound: nothing is measured, and no weight is copied."""

    bound: Positive | None = Field(
        None, description="largest divergence of the policy that a step may publish; null = off"
    )
    divergence: Literal["objective", "binary_tv", "binary_kl"] = Field(
        "objective", description="what is bounded: the objective's own divergence from its anchor, or one from mu"
    )
    statistic: Literal["mean", "max"] = Field("mean", description="over the measured tokens that carry loss")
    share: Annotated[Float, Field(gt=0, le=1)] = Field(
        0.1, description="of the step's micro-batches that is measured, chosen by run.seed and step; at least one"
    )
    halvings: CountFromZero = Field(
        5, description="beyond the bound: how often the step is halved before it is taken back; 0 = taken back at once"
    )
    learning_rate: Literal["follow", "keep"] = Field(
        "follow",
        description="after a step that is not kept whole: follow = the updates of later steps are scaled by the part "
        "that was kept, and grow back with every step that stays within half the bound; keep = they stay as large",
    )
    moments: Literal["keep", "reset"] = Field("keep", description="Adam's moments after a step that is not kept whole")
