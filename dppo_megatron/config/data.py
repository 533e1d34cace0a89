"""The section `data`: where prompts come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from .section import Count, FilePath, Float, Section

Weight = Annotated[Float, Field(gt=0, le=1e6)]


class DataFile(Section):
    """One more file of training prompts."""

    path: FilePath = Field(description="as data.train")
    weight: Weight = Field(1.0, description="prompts of this file for each one of data.train")


class DataConfig(Section):
    train: FilePath = Field(description="JSONL, parquet or a Hugging Face dataset directory, one prompt a row")
    eval: FilePath | None = Field(None, description="held-out prompts, as data.train")
    more: tuple[DataFile, ...] = Field((), description="more files of training prompts, mixed in by their weights")
    prompt_column: str = Field("prompt", description="text or messages; a.b is the field b of column a")
    answer_column: str = Field("answer", description="what a grader compares with, e.g. reward_model.ground_truth")
    source_column: str = Field("data_source", description="the row's data source, for reward.terms; may be absent")
    chat_template: bool = Field(False, description="wrap the prompt as a user turn with the tokenizer's chat template")
    prompt_template: str = Field("{prompt}", description="text around the prompt; {prompt} is replaced")
    shuffle: bool = Field(True, description="draw a new order of the prompts for each epoch, from run.seed")
    max_prompt_tokens: Count = Field(
        1024,
        description="longer prompts are an error before work starts; with the longest response at most "
        "engine.max_model_len",
    )
    overlong: Literal["refuse", "drop", "truncate"] = Field(
        "refuse",
        description="longer prompts: refuse = an error, drop = left out and counted, truncate = their last "
        "max_prompt_tokens are kept",
    )

    @property
    def train_files(self) -> tuple[tuple[Path, float], ...]:
        """Every file of training prompts with its weight."""
        return (self.train, 1.0), *((file.path, file.weight) for file in self.more)
