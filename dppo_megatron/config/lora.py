"""`model.lora`: adapters instead of weights are trained."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .section import CountFromZero, FilePath, Positive, Section

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraConfig(Section):
    r: CountFromZero = Field(0, description="rank of the adapters; 0 = none, all weights are trained")
    alpha: Positive = Field(16.0, description="an adapter counts alpha / r times")
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        LINEAR,
        min_length=1,
        description="linear layers that get one, by the last parts of their names in Hugging Face, as PEFT takes them",
    )
    adapter: FilePath | None = Field(
        None, description="start from this adapter, a directory in PEFT's format; default: one that changes nothing"
    )
